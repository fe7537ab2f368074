"""Ranks find out at the start whether they were set up alike, instead of hanging later."""

import json
from collections.abc import Mapping

import torch

from laconic.comm.base import Call, Comm
from laconic.errors import ConfigError


def agree(comm: Comm, device: torch.device, settings: Mapping[str, object]) -> None:
    """Raises ConfigError on every rank, with all differences, unless all have equal settings."""
    text = json.dumps(settings, sort_keys=True).encode()
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    told = [bytes(b.tolist()) for b in comm.answer(Call("gather", [own]))]
    if len(set(told)) == 1:
        return
    views = [json.loads(t) for t in told]
    lines = []
    for key in sorted({key for view in views for key in view}):
        by_value: dict[str, list[int]] = {}
        for rank, view in enumerate(views):
            by_value.setdefault(json.dumps(view.get(key)), []).append(rank)
        if len(by_value) > 1:
            said = "; ".join(f"{value} on rank {ranks}" for value, ranks in by_value.items())
            lines.append(f"  {key}: {said}")
    raise ConfigError("\n".join(["ranks are set up differently:", *lines]))
