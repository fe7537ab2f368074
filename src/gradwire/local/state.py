"""Statistics and checkpoint state of local methods, as plain numbers and tensors."""

from collections.abc import Mapping, Sequence
from math import hypot
from typing import cast

import torch
from torch import Tensor

from gradwire.checkpoint.state import load, own_part, save
from gradwire.comm.meter import ring_bytes
from gradwire.engine.engine import Engine
from gradwire.errors import ConfigError
from gradwire.local.workers import Peers
from gradwire.types import State


def summary(
    lanes: Sequence[Engine], peers: Peers, tensors: Sequence[Tensor], steps: int
) -> dict[str, object]:
    """The statistics of all lanes as one; dense bytes are those of a dense mean at every step."""
    each = [one.stats(peers.meter) for one in lanes]
    sent = peers.meter.sent_bytes
    dense = steps * ring_bytes(sum(t.nbytes for t in tensors), peers.size)
    return {
        **each[0],
        "dense_bytes": dense,
        "ratio": dense / sent if sent else 1.0,
        "skipped": sum(cast(int, one["skipped"]) for one in each),
        "relative_error": sum(cast(float, one["relative_error"]) for one in each) / len(each),
        "residual_norm": hypot(*(cast(float, one["residual_norm"]) for one in each)),
        "aside_bytes": peers.aside.sent_bytes,
    }


def write_state(
    head: Mapping[str, object], lanes: Sequence[Engine], tensors: Mapping[str, State]
) -> dict[str, object]:
    copies = {kind: {n: t.clone() for n, t in some.items()} for kind, some in tensors.items()}
    return {**head, "lanes": [save(one) for one in lanes], "tensors": copies}


def read_state(
    state: Mapping[str, object], key: str, identity: Mapping[str, object], lanes: Sequence[Engine]
) -> Mapping[str, object]:
    """A worker's own state, if it is of the set-up expected; the lanes take theirs."""
    own = own_part(state, key)
    for name, value in identity.items():
        if own.get(name) != value:
            raise ConfigError(f"state: {name} is {own.get(name)!r}, expected {value!r}")
    saved = cast(Sequence[Mapping[str, object]], own["lanes"])
    for one, its in zip(lanes, saved, strict=True):
        load(one, its)
    return own


def load_tensors(here: Mapping[str, State], there: Mapping[str, State]) -> None:
    """Fills the tensors with what was saved."""
    for kind, some in here.items():
        if there.get(kind, {}).keys() != some.keys():
            raise ConfigError(f"state: {kind} has {[*there.get(kind, {})]}, expected {[*some]}")
        for name, tensor in some.items():
            tensor.copy_(there[kind][name])


def float_copies(tensors: Mapping[str, Tensor], device: str | None = None) -> State:
    """The tensors as flat float32, each in memory of its own, where it is or on a device."""
    return {
        name: tensor.detach().to(device or tensor.device, torch.float32, copy=True).reshape(-1)
        for name, tensor in tensors.items()
    }


def room_for(rooms: State, name: str, like: Tensor) -> Tensor:
    """Memory for what is told of a parameter; on a GPU in the same place every time.

    Conversations there are recorded for gradients that lie still, and replayed.
    """
    if not like.is_cuda:
        return torch.empty_like(like)
    if name not in rooms:
        rooms[name] = torch.empty_like(like)
    return rooms[name]
