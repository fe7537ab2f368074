"""Statistics and checkpoint state of local methods, as plain numbers and tensors."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import hypot
from typing import cast

import torch
from torch import Tensor

from gradwire.checkpoint.state import all_or_nothing, load, save
from gradwire.checks import check_whole
from gradwire.comm.meter import ring_bytes
from gradwire.engine.engine import Engine
from gradwire.errors import ConfigError
from gradwire.identity import check_saved_identity
from gradwire.local.island import local_part
from gradwire.local.workers import Workers
from gradwire.types import State


def summary(
    engines: Sequence[Engine], workers: Workers, tensors: Sequence[Tensor], steps: int
) -> dict[str, object]:
    """Merges the statistics of all engines; dense bytes are those of a dense mean at every step."""
    each = [engine.stats(workers.meter) for engine in engines]
    policies = [row for stats in each for row in cast(list[object], stats.get("policies", []))]
    sent = workers.meter.sent_bytes
    dense = steps * ring_bytes(sum(t.nbytes for t in tensors), workers.size)
    return {
        **each[0],
        **({"policies": policies} if policies else {}),
        "dense_bytes": dense,
        "ratio": dense / sent if sent else 1.0,
        "skipped": sum(cast(int, stats["skipped"]) for stats in each),
        "relative_error": sum(cast(float, stats["relative_error"]) for stats in each) / len(each),
        "residual_norm": hypot(*(cast(float, stats["residual_norm"]) for stats in each)),
        "auxiliary_bytes": workers.aux_meter.sent_bytes,
    }


def write_state(
    header: Mapping[str, object], engines: Sequence[Engine], tensors: Mapping[str, State]
) -> dict[str, object]:
    copies = {kind: {n: t.clone() for n, t in some.items()} for kind, some in tensors.items()}
    return {**header, "engines": [save(engine) for engine in engines], "tensors": copies}


def read_state(
    own: Mapping[str, object],
    identity: Mapping[str, object],
    engines: Sequence[Engine],
    tensors: Mapping[str, State],
) -> tuple[int, int]:
    """Loads engines and tensors; returns the numbers of steps and syncs.

    Raises ConfigError, and changes nothing, if this worker's state is of other settings, or has
    entries that are not finite.
    """
    check_saved_identity("", own.get("identity"), identity)
    for name in ("steps", "syncs"):
        check_whole("state", name, own.get(name), 0)
    saved_tensors, saved_engines = own.get("tensors"), own.get("engines")
    for kind, some in tensors.items():
        found = saved_tensors.get(kind) if isinstance(saved_tensors, Mapping) else None
        _check_tensors(kind, some, found)
    if not isinstance(saved_engines, Sequence) or len(saved_engines) != len(engines):
        raise ConfigError(f"state: expected the states of {len(engines)} engines")
    with ExitStack() as undo:
        for engine in engines:
            undo.enter_context(all_or_nothing(engine))
        for engine, engine_state in zip(engines, saved_engines, strict=True):
            load(engine, engine_state)
    for kind, some in tensors.items():
        for name, tensor in some.items():
            tensor.copy_(cast(Mapping[str, State], saved_tensors)[kind][name])
    return cast(int, own["steps"]), cast(int, own["syncs"])


def _check_tensors(kind: str, targets: State, saved: object) -> None:
    """Raises ConfigError unless there are saved tensors for all targets, and they are finite."""
    found = saved if isinstance(saved, Mapping) else {}
    for name in [*targets, *found]:
        tensor, target = found.get(name), targets.get(name)
        if target is None:
            raise ConfigError(f"state: {kind} has {name!r}, which this method does not have")
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"state: {kind} of {name!r} must be a tensor, got {tensor!r:.40}")
        if (tensor.shape, tensor.dtype) != (target.shape, target.dtype):
            got, wanted = (f"{tuple(t.shape)} {t.dtype}" for t in (tensor, target))
            raise ConfigError(f"state: {kind} of {name!r} is {got}, expected {wanted}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ConfigError(
                f"state: {kind} of {name!r} has entries that are not finite; load an earlier "
                "checkpoint"
            )


def float_copies(tensors: Mapping[str, Tensor], device: str | None = None) -> State:
    """Returns flat float32 copies of local parts, on their own device unless one is given."""
    return {
        name: local_part(tensor).to(device or tensor.device, torch.float32, copy=True).reshape(-1)
        for name, tensor in tensors.items()
    }


def buffer_for(buffers: State, name: str, numel: int, device: torch.device) -> Tensor:
    """Returns a float32 buffer for a parameter's drift; on a GPU the same one every time.

    CUDA graphs are captured for tensors whose addresses stay the same.
    """
    if device.type != "cuda":
        return torch.empty(numel, device=device)
    if name not in buffers:
        buffers[name] = torch.empty(numel, device=device)
    return buffers[name]
