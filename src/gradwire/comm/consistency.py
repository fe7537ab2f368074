"""Checks that ranks agree: equal settings at the start, equal parameters later."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.comm.base import Collective, Comm
from gradwire.errors import ConfigError, PeerError, WireError

MAX_SETTINGS_BYTES = 64 << 20
"""Upper bound of the settings' length, which take some hundred bytes per parameter."""

NOT_SET = "not set"
"""Stands for the value of an entry that a view lacks."""

_MISSING = object()


def check_equal_settings(comm: Comm, device: torch.device, settings: Mapping[str, object]) -> None:
    """Raises ConfigError on every rank, with all differences, unless all have equal settings."""
    compare_settings(comm.run(settings_collective(comm.size, device, settings)))


def check_on_all_ranks(
    comm: Comm,
    device: torch.device,
    settings: Mapping[str, object],
    refused: ConfigError | None,
) -> None:
    """Raises ConfigError on all ranks if any of them refuses, or has other settings."""
    outcome = {"refused": str(refused)} if refused else settings
    try:
        check_equal_settings(comm, device, outcome)
    except ConfigError as error:
        raise refused or error from None
    if refused:
        raise refused


def settings_collective(
    size: int, device: torch.device, settings: Mapping[str, object]
) -> Collective:
    """Sends the settings to all ranks; `compare_settings` takes what it returns."""
    text = json.dumps(settings, sort_keys=True).encode()
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    return Collective("gather", [own], limits=[MAX_SETTINGS_BYTES] * size)


def compare_settings(gathered: Sequence[Tensor]) -> None:
    """Raises ConfigError, with all differences, unless all ranks sent the same settings."""
    texts = [bytes(b.tolist()) for b in gathered]
    if len(set(texts)) == 1:
        return
    views = [_parse_settings(rank, text) for rank, text in enumerate(texts)]
    lines = []
    for path, values in differences(views):
        by_value: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            by_value.setdefault(value, []).append(rank)
        shown = "; ".join(f"{value} on rank {ranks}" for value, ranks in by_value.items())
        lines.append(f"  {path}: {shown}")
    if lines:
        raise ConfigError("\n".join(["ranks are set up differently:", *lines]))


def differences(views: Sequence[object], path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yields the entries in which JSON values differ: the path of each, and all values as text.

    Of objects of different classes it yields the class alone.
    """
    texts = [NOT_SET if v is _MISSING else json.dumps(v, sort_keys=True) for v in views]
    if len(set(texts)) == 1:
        return
    entries = [_entries(view, path) for view in views]
    known = [own for own in entries if own is not None]
    if len(known) < len(views):
        yield path, texts
        return
    name = f"{path}.class" if path else "class"
    names = dict.fromkeys(key for own in known for key in own)
    if len({json.dumps(own.get(name)) for own in known}) > 1:
        names = {name: None}
    for key in names:
        yield from differences([own.get(key, _MISSING) for own in known], key)


def _entries(view: object, path: str) -> dict[str, object] | None:
    """Returns the entries of a dict or list by path, or None if the value is neither."""
    if isinstance(view, Mapping):
        return {f"{path}.{key}" if path else str(key): value for key, value in view.items()}
    if isinstance(view, list):
        return {f"{path}[{index}]": value for index, value in enumerate(view)}
    return None


def _parse_settings(rank: int, text: bytes) -> dict[str, object]:
    """Parses the settings that a rank sent, which may be arbitrary bytes."""
    try:
        view = json.loads(text)
        # Fails if it is nested too deeply to compare.
        json.dumps(view)
    except (ValueError, RecursionError) as error:
        raise WireError(f"rank {rank} sent settings that cannot be read: {error}") from error
    if not isinstance(view, dict):
        raise WireError(f"rank {rank} sent settings that are a {type(view).__name__}")
    return view


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_equal_tensors(comm: Comm, tensors: Mapping[str, Tensor]) -> None:
    """Raises PeerError on every rank, with names and ranks, unless all hold the same bits.

    Takes one pass over memory and 8 bytes per tensor on the wire. Any single flipped bit is
    detected; changes that cancel out in the sum are not.
    """
    if not tensors:
        return
    lines = describe_differences(comm.run(digests_collective(tensors, comm.size)), tensors)
    if lines:
        raise PeerError("\n".join(["parameters have drifted apart:", *lines]))


def digests_collective(tensors: Mapping[str, Tensor], size: int) -> Collective:
    """Sends a digest of each tensor to all ranks; `describe_differences` takes what it returns."""
    own = digests(tensors)
    return Collective("gather", [own.view(torch.uint8)], [own.nbytes] * size)


def digests(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the sum of each tensor's bits, read as integers, as int64."""
    return torch.stack([_digest(tensor) for tensor in tensors.values()])


def describe_differences(gathered: Sequence[Tensor], names: Iterable[str]) -> list[str]:
    """Returns a line for every tensor that differs, with the ranks that are in the minority."""
    rows = [row.view(torch.int64).tolist() for row in gathered]
    lines = []
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        usual = Counter(column).most_common(1)[0][0]
        odd = [rank for rank, digest in enumerate(column) if digest != usual]
        if odd:
            lines.append(f"  {name}: rank {odd} differ from the others")
    return lines


def _digest(tensor: Tensor) -> Tensor:
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.itemsize])
    return words.sum(dtype=torch.int64)
