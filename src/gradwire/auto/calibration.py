"""Calibration: cost and compression error of a method on a sample of this rank's gradients.

One rank's exchange runs with mirrored peers, so no message is sent and no state of the training is
touched. Costs of the sample are scaled to the whole group of parameters that it is taken from.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.auto.step_model import ExchangeLoad
from gradwire.comm.base import run_program
from gradwire.comm.cost_model import transfer
from gradwire.comm.mirror import MirrorComm, UnknownAnswer
from gradwire.engine.engine import Engine
from gradwire.engine.plan import Plan
from gradwire.spec import ExchangeConfig

SAMPLE_NUMEL = 1 << 20
"""Entries of the samples of all groups: a few milliseconds for most methods."""
LOAD_NUMEL = 1 << 16
"""Entries of the sample from which only bytes are counted."""
SAMPLED_STEPS = 3
"""Gradients of different steps: a warm-up, in which kernels are compiled, a timed run, and one that
measures the error, of gradient and residual."""


class Calibration(NamedTuple):
    """Cost of one step of a method for a group, and its error; mean over ranks later."""

    codec_s: float
    """Encoding and decoding."""
    hops: float
    """Transfers of one bucket that wait for one another."""
    link_bytes: float
    """Bytes that leave through a rank's link in a step."""
    error: float
    """Sum of squares of what one step does not send."""
    total: float
    """Sum of squares of gradient plus residual."""

    def load(self) -> ExchangeLoad:
        return ExchangeLoad(self.codec_s, self.hops, self.link_bytes)


class GradientSample:
    """Slices of the largest gradients of this rank, by group and by the names of lanes."""

    def __init__(self, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        """`shapes` are those of the lanes of each group."""
        self._groups = [sample_rows(own, SAMPLE_NUMEL // len(shapes)) for own in shapes]
        self._rows = {name: rows for group in self._groups for name, rows in group.items()}
        self.steps: list[dict[str, Tensor]] = [{}]
        """The slices of the last steps, and of the step under way."""

    def take(self, name: str, grad: Tensor, scale: float) -> None:
        """Copies the slice of a gradient, which is multiplied by a loss scale."""
        if name in self._rows:
            rows = grad.detach()[: self._rows[name]]
            self.steps[-1][name] = rows.to(torch.float32, copy=True).div_(scale)

    def end_step(self, *, counts: bool) -> None:
        """Keeps the slices of a step that counts, and begins the next one."""
        kept = self.steps if counts else self.steps[:-1]
        self.steps = [*kept[-SAMPLED_STEPS:], {}]

    def sampled(self) -> list[list[dict[str, Tensor]]]:
        """Returns each group's slices of the last steps, of parameters with gradients in all."""
        return [self._sampled(group) for group in self._groups]

    def _sampled(self, group: Iterable[str]) -> list[dict[str, Tensor]]:
        steps = self.steps[:-1]
        names = [n for n in group if all(n in step for step in steps)]
        return [{n: step[n] for n in names} for step in steps]


def sample_rows(shapes: Mapping[str, tuple[int, ...]], room: int) -> dict[str, int]:
    """Returns how many rows of which matrices to sample, the largest first."""
    sizes: dict[str, int] = {n: prod(shape) for n, shape in shapes.items() if len(shape) > 1}
    found: dict[str, int] = {}
    for name in sorted(filter(sizes.__getitem__, sizes), key=lambda n: -sizes[n]):
        if room <= 0:
            break
        length = shapes[name][0]
        found[name] = min(length, max(1, room * length // sizes[name]))
        room -= found[name] * sizes[name] // length
    return found


def calibrate(
    plan: Plan,
    samples: Sequence[Mapping[str, Tensor]],
    tensors: Iterable[Tensor],
    size: int,
    timer: Callable[[], float],
) -> Calibration:
    """Runs a method on samples of some steps; returns what it would cost for all `tensors`."""
    everything, sample = list(tensors), samples[-1]
    if not sample:
        return Calibration(0.0, *link_load(plan, everything, size), 0.0, 0.0)
    engine = Engine(plan, sample, 0, size, seed=0, nan_policy="ignore", cuda_graphs=False)
    for lane in engine.lanes.values():
        # Steps 1 to n, of which the last one is sampled.
        lane.ctx = lane.ctx._replace(step=1)
        lane.sample_every = len(samples)
    times_s, comm = [], MirrorComm(size)
    for own in samples:
        comm = MirrorComm(size)
        times_s.append(_run(engine, own, comm, timer))
    errors = [e for lane in engine.lanes.values() if (e := lane.sampled_error) is not None]
    numel_scale = sum(t.numel() for t in everything) / sum(t.numel() for t in sample.values())
    if not errors and plan.exchange.name == "sharded":
        # Shards of other lengths could not be mirrored; the first encoding is the same in a gather.
        gather = replace(plan, exchange=ExchangeConfig("gather"))
        error, total = calibrate(gather, samples, everything, size, timer)[-2:]
    else:
        summed = torch.stack(errors).sum(0).tolist() if errors else (0.0, 0.0)
        error, total = (numel_scale * number for number in summed)
    hops, link_bytes = _scaled_load(plan, comm, sample.values(), everything)
    return Calibration(times_s[len(samples) // 2] * numel_scale, hops, link_bytes, error, total)


def link_load(plan: Plan, tensors: Sequence[Tensor], size: int) -> tuple[float, float]:
    """Returns hops and bytes of a step of a method, which do not depend on the gradients.

    They are those of a small sample of zeros, so that a link that has changed costs little.
    """
    shapes = {str(i): tuple(t.shape) for i, t in enumerate(tensors)}
    rows = sample_rows(shapes, LOAD_NUMEL)
    sample = {name: torch.zeros_like(tensors[int(name)][:n]) for name, n in rows.items()}
    if not sample:
        sample = {name: torch.zeros_like(tensors[int(name)]) for name in shapes}
    if not sample:
        return 0.0, 0.0
    # Update rules go by the names of parameters, and change no message.
    plan = replace(plan, rules=(), updates_mean=False)
    engine = Engine(plan, sample, 0, size, seed=0, nan_policy="ignore", cuda_graphs=False)
    comm = MirrorComm(size)
    _run(engine, sample, comm, lambda: 0.0)
    return _scaled_load(plan, comm, sample.values(), tensors)


def _scaled_load(
    plan: Plan, comm: MirrorComm, sample: Iterable[Tensor], tensors: Iterable[Tensor]
) -> tuple[float, float]:
    """Returns hops of the collectives of a sample, and bytes as they would be for all tensors."""
    loads = [transfer(r.kind, r.nbytes, r.size) for r in comm.records]
    scale = plan.message_bytes(tensors) / max(1, plan.message_bytes(sample))
    return sum(load.hops for load in loads), sum(load.link_bytes for load in loads) * scale


def _run(
    engine: Engine, sample: Mapping[str, Tensor], comm: MirrorComm, timer: Callable[[], float]
) -> float:
    """Takes one step with copies of the sample, and returns its seconds."""
    grads = [tensor.clone() for tensor in sample.values()]
    start_s = timer()
    # Messages about shards of other lengths cannot be mirrored: the last decoding is left out.
    with suppress(UnknownAnswer):
        run_program(engine.bucket_program([*sample], grads), comm)
    taken_s = timer() - start_s
    engine.end_step()
    engine.commit_step()
    return taken_s


def device_timer(device: torch.device) -> Callable[[], float]:
    """Returns a timer that waits for the device's work."""

    def now_s() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter()

    return now_s
