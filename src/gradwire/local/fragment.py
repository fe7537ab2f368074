"""Fragments: partition of the parameters, and the anchor, drift and outer step of each part.

The anchor is the value that all workers last agreed on; the drift is anchor - parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gradwire import kernels
from gradwire.checks import check_fraction_below_one, check_number, check_whole
from gradwire.comm.base import CollectiveProgram
from gradwire.engine.engine import Engine
from gradwire.errors import ConfigError
from gradwire.kernels.specs import DriftTensors
from gradwire.local.anchors import AnchorStore
from gradwire.local.island import local_part
from gradwire.local.state import buffer_for, float_copies
from gradwire.types import State

Partition: TypeAlias = int | Sequence[Sequence[str]]
"""A number of parts, to which layers are dealt in turn; or each part's parameter-name prefixes."""

ON_DEVICE = AnchorStore("device")

Named: TypeAlias = dict[str, nn.Parameter]

IDLE, IN_FLIGHT, FAILED = range(3)
"""Status of a fragment's drift: none, one whose mean is due, or one whose mean was not finite."""


def partition_parameters(
    method: str, parameters: Mapping[str, nn.Parameter], partition: Partition
) -> list[Named]:
    """Returns the parts, in the model's order of parameters; every parameter is in one of them."""
    if isinstance(partition, Sequence):
        return _by_names(method, parameters, partition)
    check_whole(method, "fragments", partition, 1)
    layers = list(dict.fromkeys(_layer(name) for name in parameters))
    if partition > len(layers):
        raise ConfigError(
            f"{method}: fragments must be at most {len(layers)}, the number of layers, "
            f"got {partition}"
        )
    # Neighbouring layers go into different parts, so that all parts are alike in depth.
    part_of = {layer: number % partition for number, layer in enumerate(layers)}
    return [
        {n: p for n, p in parameters.items() if part_of[_layer(n)] == i} for i in range(partition)
    ]


def _by_names(
    method: str, parameters: Mapping[str, nn.Parameter], prefixes: Sequence[Sequence[str]]
) -> list[Named]:
    parts = [
        {name: p for name, p in parameters.items() if name.startswith(tuple(starts))}
        for starts in prefixes
    ]
    for name in parameters:
        count = sum(name in part for part in parts)
        if count != 1:
            raise ConfigError(
                f"{method}: parameter {name!r} matches {count} fragments, expected exactly one"
            )
    if not all(parts):
        raise ConfigError(f"{method}: a fragment matches no parameter, in {list(prefixes)}")
    return parts


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


@dataclass(frozen=True)
class OuterSGD:
    """The step of the anchor along the mean drift d: anchor -= rate (d + momentum m).

    Here m = momentum m + d, which is Nesterov's step; without `nesterov` it is anchor -= rate m.
    """

    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True

    def check(self, method: str) -> None:
        check_number(method, "outer_lr", self.rate)
        if not self.rate > 0:
            raise ConfigError(f"{method}: outer_lr must be positive, got {self.rate!r}")
        check_fraction_below_one(method, "outer_momentum", self.momentum)

    def direction(self, means: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
        """Updates the momenta and returns the step without the rate; `momenta` may be empty."""
        if not momenta:
            return means
        torch._foreach_mul_(momenta, self.momentum)
        torch._foreach_add_(momenta, means)
        lookahead = torch._foreach_add(means, momenta, alpha=self.momentum)
        return list(lookahead) if self.nesterov else momenta


class Fragment:
    """Parameters that are synchronised together: the whole model, or one of several parts of it.

    When a mean is applied, parameters become (1 - alpha) anchor + alpha parameters. With `alpha`
    None all steps taken since the drift was captured stay on top of the mean, and are part of the
    next drift. `base` is then the parameter without the steps that are not sent yet: the anchor,
    rounded to the parameter's type. That rounding is not part of the drift. Until the mean is
    applied, parameters keep only the fraction `ahead` of the drift that is in flight.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        engine: Engine,
        outer: OuterSGD,
        alpha: float | None,
        ahead: float,
        store: AnchorStore = ON_DEVICE,
    ) -> None:
        self.parameters, self.engine, self.outer = parameters, engine, outer
        self.alpha, self.ahead = alpha, ahead
        self._store, self._device = store, next(iter(parameters.values())).device
        self.anchor = store.kept(float_copies(parameters))
        zeros = {name: torch.zeros_like(anchor) for name, anchor in self.anchor.items()}
        self.momentum: State = store.kept(zeros) if outer.momentum else {}
        self.base: State = float_copies(parameters) if alpha is None else {}
        self.drift: State = {}
        # A tensor, so that it is saved with the drift: zeros in flight are not the same as none.
        self.status = torch.tensor(IDLE)
        self._buffers: State = {}

    def initialize(self) -> None:
        """Sets the anchor to the current parameters, which are equal on all workers.

        If it is kept in bfloat16, they are rounded to it.
        """
        for name, copy in float_copies(self.parameters).items():
            self.anchor[name].copy_(copy)
            if self.base:
                self.base[name].copy_(copy)
        if self._store.kind == "bf16":
            self._mix_with_anchor(0.0)

    def saved_drift(self) -> State:
        """Returns the buffers of the drift to save or load; they are zeros if none is in flight."""
        buffers = self._drift_buffers()
        if int(self.status) != IN_FLIGHT:
            torch._foreach_zero_(buffers)
        return self.drift

    def capture_drift(self) -> None:
        """Computes the drift of the parameters."""
        self.status.fill_(IN_FLIGHT)
        drifts = self._drift_buffers()
        if self.alpha is None:
            with self._kernel_tensors(drifts) as tensors:
                kernels.on(drifts[0].device).capture_drift(tensors, self.ahead)
        else:
            torch._foreach_copy_(drifts, self._rounded_anchor())
            torch._foreach_sub_(drifts, self._flat())

    def average_drift(self) -> CollectiveProgram[None]:
        """Replaces the drift by the compressed mean over all workers."""
        yield from self.engine.bucket_program(list(self.drift), list(self.drift.values()))
        self.engine.end_step()
        error = self.engine.commit_step()
        if error is not None:
            raise error

    def apply_mean(self) -> None:
        """Moves the anchor along the mean drift, and the parameters with it."""
        if self.alpha is None:
            steps = self.outer.direction(list(self.drift.values()), list(self.momentum.values()))
            with self._kernel_tensors(steps) as tensors:
                kernels.on(steps[0].device).apply_outer_mean(tensors, self.outer.rate)
        else:
            self._step_anchor()
            self._mix_with_anchor(self.alpha)
        self.status.fill_(IDLE)
        self.drift.clear()

    def discard_mean(self) -> None:
        """Drops a mean that is not finite: the next drift is measured from the anchor again."""
        self.status.fill_(FAILED)
        self.drift.clear()
        for name, base in self.base.items():
            base.copy_(self.anchor[name].to(self.parameters[name].dtype))

    def apply_and_capture(self) -> None:
        """Applies the mean and captures the next drift, in fewer passes over memory."""
        if self.alpha is not None or self.momentum:
            self.apply_mean()
            self.capture_drift()
            return
        drifts = list(self.drift.values())
        with self._kernel_tensors(drifts) as tensors:
            kernels.on(drifts[0].device).apply_and_capture(tensors, self.outer.rate, self.ahead)

    def sync(self) -> CollectiveProgram[None]:
        """Captures the drift, averages it and applies the mean, without a delay."""
        self.capture_drift()
        yield from self.average_drift()
        self.apply_mean()

    def _step_anchor(self) -> None:
        """Moves the anchor along the mean drift."""
        store, lanes = self._store, self.engine.lanes
        for names in store.batches(list(self.drift)):
            anchors = store.load(self.anchor, names, self._device)
            momenta = store.load(self.momentum, names, self._device)
            steps = self.outer.direction([self.drift[name] for name in names], momenta)
            torch._foreach_sub_(anchors, steps, alpha=self.outer.rate)
            store.save(anchors, self.anchor, names, lanes, word=0)
            store.save(momenta, self.momentum, names, lanes, word=1)

    def _mix_with_anchor(self, alpha: float) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                part = local_part(parameter)
                anchor = self.anchor[name].view(part.shape).to(part.device, part.dtype)
                part.copy_(anchor.lerp(part, alpha) if alpha else anchor)

    def _drift_buffers(self) -> list[Tensor]:
        for name, anchor in self.anchor.items():
            if name not in self.drift:
                size = anchor.numel()
                self.drift[name] = buffer_for(self._buffers, name, size, self._device)
        return list(self.drift.values())

    def _flat(self) -> list[Tensor]:
        return [local_part(parameter).reshape(-1) for parameter in self.parameters.values()]

    @contextmanager
    def _kernel_tensors(self, drifts: list[Tensor]) -> Iterator[DriftTensors]:
        """Yields what the kernels write to; non-contiguous parameters are copied there and back."""
        flat = self._flat()
        yield DriftTensors(flat, list(self.base.values()), list(self.anchor.values()), drifts)
        for parameter, vector in zip(self.parameters.values(), flat, strict=True):
            part = local_part(parameter)
            if vector.data_ptr() != part.data_ptr():
                part.copy_(vector.view(part.shape))

    def _rounded_anchor(self) -> list[Tensor]:
        """Returns the values that parameters got from the anchor, which 16-bit types round."""
        return [self.anchor[name].to(p.device, p.dtype) for name, p in self.parameters.items()]
