"""Checks that ranks agree: equal settings at the start, equal parameters later."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.comm.base import Collective, Comm
from gradwire.errors import ConfigError, PeerError, WireError

MOST_BYTES = 64 << 20
"""No settings are longer: some hundred bytes a parameter."""


def agree(comm: Comm, device: torch.device, settings: Mapping[str, object]) -> None:
    """Raises ConfigError on every rank, with all differences, unless all have equal settings."""
    compare(comm.answer(settings_call(comm.size, device, settings)))


def settings_call(size: int, device: torch.device, settings: Mapping[str, object]) -> Collective:
    """Tells all ranks the settings; `compare` takes the answer."""
    text = json.dumps(settings, sort_keys=True).encode()
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    return Collective("gather", [own], limits=[MOST_BYTES] * size)


def compare(answer: Sequence[Tensor]) -> None:
    """Raises ConfigError, with all differences, unless all have told the same settings."""
    told = [bytes(b.tolist()) for b in answer]
    if len(set(told)) == 1:
        return
    views = [_read(rank, text) for rank, text in enumerate(told)]
    lines = []
    for key in sorted({key for view in views for key in view}):
        by_value: dict[str, list[int]] = {}
        for rank, view in enumerate(views):
            by_value.setdefault(json.dumps(view.get(key)), []).append(rank)
        if len(by_value) > 1:
            said = "; ".join(f"{value} on rank {ranks}" for value, ranks in by_value.items())
            lines.append(f"  {key}: {said}")
    raise ConfigError("\n".join(["ranks are set up differently:", *lines]))


def _read(rank: int, text: bytes) -> dict[str, object]:
    """The settings that a rank told; what it told may be anything."""
    try:
        view = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"rank {rank} tells settings that cannot be read: {error}") from error
    if not isinstance(view, dict):
        raise WireError(f"rank {rank} tells settings that are a {type(view).__name__}")
    return view


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same(comm: Comm, tensors: Mapping[str, Tensor]) -> None:
    """Raises PeerError on every rank, with names and ranks, unless all hold the same bits.

    One pass over memory and 8 bytes a tensor on the wire. Any single flipped bit is seen; changes
    that cancel out in the sum are not.
    """
    if not tensors:
        return
    lines = differences(comm.answer(digests_call(tensors, comm.size)), tensors)
    if lines:
        raise PeerError("\n".join(["parameters have drifted apart:", *lines]))


def digests_call(tensors: Mapping[str, Tensor], size: int) -> Collective:
    """Tells all ranks a sum of bits of each tensor; `differences` takes the answer."""
    own = digests(tensors)
    return Collective("gather", [own.view(torch.uint8)], [own.nbytes] * size)


def digests(tensors: Mapping[str, Tensor]) -> Tensor:
    """A sum of bits of each tensor, as int64."""
    return torch.stack([_digest(tensor) for tensor in tensors.values()])


def differences(answer: Sequence[Tensor], names: Iterable[str]) -> list[str]:
    """A line for every tensor that is not the same everywhere, with the ranks that stand out."""
    told = [row.view(torch.int64).tolist() for row in answer]
    lines = []
    for name, said in zip(names, zip(*told, strict=True), strict=True):
        usual = Counter(said).most_common(1)[0][0]
        odd = [rank for rank, digest in enumerate(said) if digest != usual]
        if odd:
            lines.append(f"  {name}: rank {odd} differ from the others")
    return lines


def _digest(tensor: Tensor) -> Tensor:
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.itemsize])
    return words.sum(dtype=torch.int64)
