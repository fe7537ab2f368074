"""Pipeline stages in one process: a model whose tensors at some places pass through messages.

The same ends encode, check and decode as between real stages, so losses and bytes are those of a
real pipeline with these cuts. Only the wire is missing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.base import OneRound
from gradwire.comm.meter import Meter
from gradwire.errors import ConfigError
from gradwire.stages.boundary import Channel, Receiver, Sender, Settings, StepInfo
from gradwire.stages.method import DIRECTIONS, Direction
from gradwire.stages.samples import MicroBatches, SampleMemory


class _Boundary(nn.Module):
    """Both ends of a boundary: activations pass in forward, their gradients in backward."""

    def __init__(self, ends: dict[Direction, tuple[Sender, Receiver]], step: StepInfo) -> None:
        nn.Module.__init__(self)
        self.ends, self.step, self.microbatch = ends, step, 0

    def carry(self, direction: Direction, x: Tensor, microbatch: int) -> Tensor:
        """Sends a tensor and receives it."""
        sender, receiver = self.ends[direction]
        target = torch.empty_like(x)
        receiver.post(microbatch, 0, target).copy_(sender.encode(microbatch, 0, x))
        receiver.fill(microbatch)
        return target


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: _Boundary) -> Tensor:
        ctx.boundary, ctx.microbatch = boundary, boundary.microbatch
        return boundary.carry("activations", x.contiguous(), boundary.microbatch)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [grad] = grads
        return ctx.boundary.carry("gradients", grad.contiguous(), ctx.microbatch), None


class SimulatedStages:
    """Cuts a sequence of layers into stages of about equal length, with messages between them."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        stages: int,
        methods: dict[Direction, OneRound],
        microbatches: int,
        memory: SampleMemory | None = None,
        seed: int = 0,
    ) -> None:
        if not 2 <= stages <= len(layers):
            raise ConfigError(f"stages must be 2 to {len(layers)}, got {stages}")
        self.meter, self._step = Meter(), StepInfo(microbatches=microbatches)
        self._boundaries: list[_Boundary] = []
        for lower in range(stages - 1):
            ends: dict[Direction, tuple[Sender, Receiver]] = {}
            for direction in DIRECTIONS:
                kept = memory if direction == "activations" else None
                settings = Settings(lower, direction, (methods[direction],), kept, None, seed)
                channels = [Channel(settings, self._step, self.meter) for _ in range(2)]
                ends[direction] = Sender(channels[0]), Receiver(channels[1])
            boundary = _Boundary(ends, self._step)
            self._boundaries.append(boundary)
            last = layers[(lower + 1) * len(layers) // stages - 1]
            last.register_forward_hook(_carrying(boundary))

    def begin_step(self, ids: Sequence[int] | None = None, *, trains: bool = True) -> None:
        step = self._step
        step.number, step.trains = step.number + 1, trains
        step.samples = None if ids is None else MicroBatches(ids, step.microbatches)
        for sender, receiver in self._ends():
            sender.begin_step(None)
            receiver.begin_step()

    def begin_microbatch(self, number: int) -> None:
        for boundary in self._boundaries:
            boundary.microbatch = number

    def sent_bytes(self, direction: Direction) -> tuple[int, int]:
        """Returns the bytes of all messages in a direction, and those without compression."""
        counts = [b.ends[direction][0].channel.counts for b in self._boundaries]
        return sum(c.nbytes for c in counts), sum(c.dense_bytes for c in counts)

    def _ends(self) -> list[tuple[Sender, Receiver]]:
        return [pair for boundary in self._boundaries for pair in boundary.ends.values()]


def _carrying(boundary: _Boundary) -> Any:
    def hook(_: nn.Module, __: object, output: Tensor) -> Tensor:
        # Evaluation looks at the model, not at the wire: batches there have other shapes.
        if not torch.is_grad_enabled():
            return output
        carried: Tensor = _Carry.apply(output, boundary)  # type: ignore[no-untyped-call]
        return carried

    return hook
