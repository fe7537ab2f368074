"""Ranks find out at the start whether they were set up alike, instead of hanging later."""

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from laconic.comm.base import Call, Comm
from laconic.errors import ConfigError, WireError

MOST_BYTES = 64 << 20
"""No settings are longer: some hundred bytes a parameter."""


def agree(comm: Comm, device: torch.device, settings: Mapping[str, object]) -> None:
    """Raises ConfigError on every rank, with all differences, unless all have equal settings."""
    compare(comm.answer(settings_call(comm.size, device, settings)))


def settings_call(size: int, device: torch.device, settings: Mapping[str, object]) -> Call:
    """Tells all ranks the settings; `compare` takes the answer."""
    text = json.dumps(settings, sort_keys=True).encode()
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    return Call("gather", [own], limits=[MOST_BYTES] * size)


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
