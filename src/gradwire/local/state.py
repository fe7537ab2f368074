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
from gradwire.local.workers import Workers
from gradwire.types import State


def summary(
    engines: Sequence[Engine], workers: Workers, tensors: Sequence[Tensor], steps: int
) -> dict[str, object]:
    """Merges the statistics of all engines; dense bytes are those of a dense mean at every step."""
    each = [engine.stats(workers.meter) for engine in engines]
    sent = workers.meter.sent_bytes
    dense = steps * ring_bytes(sum(t.nbytes for t in tensors), workers.size)
    return {
        **each[0],
        "dense_bytes": dense,
        "ratio": dense / sent if sent else 1.0,
        "skipped": sum(cast(int, stats["skipped"]) for stats in each),
        "relative_error": sum(cast(float, stats["relative_error"]) for stats in each) / len(each),
        "residual_norm": hypot(*(cast(float, stats["residual_norm"]) for stats in each)),
        "aside_bytes": workers.aux_meter.sent_bytes,
    }


def write_state(
    header: Mapping[str, object], engines: Sequence[Engine], tensors: Mapping[str, State]
) -> dict[str, object]:
    copies = {kind: {n: t.clone() for n, t in some.items()} for kind, some in tensors.items()}
    return {**header, "engines": [save(engine) for engine in engines], "tensors": copies}


def read_state(
    state: Mapping[str, object], key: str, identity: Mapping[str, object], engines: Sequence[Engine]
) -> Mapping[str, object]:
    """Loads the engines' states; returns a worker's own part if its settings are as expected."""
    own = own_part(state, key)
    for name, value in identity.items():
        if own.get(name) != value:
            raise ConfigError(f"state: {name} is {own.get(name)!r}, expected {value!r}")
    saved = cast(Sequence[Mapping[str, object]], own["engines"])
    for engine, engine_state in zip(engines, saved, strict=True):
        load(engine, engine_state)
    return own


def load_tensors(targets: Mapping[str, State], saved: Mapping[str, State]) -> None:
    """Copies saved tensors into those of the method."""
    for kind, some in targets.items():
        if saved.get(kind, {}).keys() != some.keys():
            raise ConfigError(f"state: {kind} has {[*saved.get(kind, {})]}, expected {[*some]}")
        for name, tensor in some.items():
            tensor.copy_(saved[kind][name])


def float_copies(tensors: Mapping[str, Tensor], device: str | None = None) -> State:
    """Returns flat float32 copies of the tensors, on their own device unless one is given."""
    return {
        name: tensor.detach().to(device or tensor.device, torch.float32, copy=True).reshape(-1)
        for name, tensor in tensors.items()
    }


def buffer_for(buffers: State, name: str, like: Tensor) -> Tensor:
    """Returns a buffer for a parameter's drift; on a GPU the same one every time.

    CUDA graphs are captured for tensors whose addresses stay the same.
    """
    if not like.is_cuda:
        return torch.empty_like(like)
    if name not in buffers:
        buffers[name] = torch.empty_like(like)
    return buffers[name]
