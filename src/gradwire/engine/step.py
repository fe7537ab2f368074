"""The main path: runs one gradient through its lane, and the lanes of a bucket side by side.

A lane is the pipeline of one parameter: its memory, its compressor inside an exchange, and their
state. `lane_rounds` runs one gradient through it. `run_rounds` runs the lanes of a bucket side by
side, so that each round of all of them is one buffer and one collective per kind of request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.base import Aggregator, Compressor, Memory
from gradwire.comm.base import CollectiveProgram
from gradwire.comm.internode import internode_collective
from gradwire.engine.batching import batches
from gradwire.engine.nonfinite import GUARD, Flag, NonFiniteGuard
from gradwire.engine.piggyback import STATISTICS, Piggyback
from gradwire.kernels.validation import check_floating
from gradwire.types import Answer, EFInput, EncodeContext, Request, Rounds, State

SAMPLE_EVERY = 100
"""The relative error costs extra passes over memory, so one step in this many measures it."""


@dataclass
class Lane:
    """The pipeline of one parameter's gradients, with its state.

    A step writes pending state; `commit` makes it the state, `discard` drops it.
    """

    name: str
    compressor: Compressor
    aggregator: Aggregator
    """The compressor itself if it defines its own rounds, else the exchange around it."""
    memory: Memory
    ctx: EncodeContext
    device: torch.device
    reversible: bool = True
    """True if a step can be discarded; doubles the memory's footprint."""
    memory_state: State = field(init=False)
    aggregator_state: State = field(init=False)
    message_bytes: int = field(init=False)
    """Approximate length of a message; kept since it is read at every step."""
    propagates_nonfinite: bool = field(init=False)
    """True if a non-finite gradient always yields a non-finite value in the first message."""
    relative_error: Tensor | None = None
    sample_every: int = field(init=False, default=SAMPLE_EVERY)
    sampled_error: Tensor | None = field(init=False, default=None)  # [2]
    """Squared norms of the last step's compression error and input, if it was sampled."""
    _pending_memory: State = field(init=False)
    _pending_aggregator: State | None = field(init=False, default=None)
    _input: EFInput | None = field(init=False, default=None)
    """The compressor's input while its rounds are under way."""

    def __post_init__(self) -> None:
        self.memory_state = self.memory.state(self.ctx.numel, self.device)
        self.aggregator_state = self.aggregator.state(self.ctx, self.device)
        self._pending_memory = self._new_memory()
        self._note_constants()

    def _note_constants(self) -> None:
        self.message_bytes = self.compressor.nbytes(self.ctx.shape)
        self.propagates_nonfinite = self.aggregator.propagates_nonfinite

    def begin_step(self) -> tuple[State, State]:
        """Returns the pending states of memory and aggregator, for the step to fill."""
        if not self.reversible:
            self._pending_memory = self.memory_state
        elif (
            # The state was replaced from outside: loaded, switched, or captured as a CUDA graph.
            self._pending_memory.keys() != self.memory_state.keys()
            or self._pending_memory is self.memory_state
        ):
            self._pending_memory = self._new_memory()
        self._pending_aggregator = dict(self.aggregator_state)
        return self._pending_memory, self._pending_aggregator

    def commit(self) -> None:
        """Makes the pending state the state, and advances to the next step."""
        if self._pending_aggregator is not None:
            self.memory_state, self._pending_memory = self._pending_memory, self.memory_state
            self.aggregator_state, self._pending_aggregator = self._pending_aggregator, None
            self.ctx = self.ctx._replace(step=self.ctx.step + 1)

    def discard(self) -> None:
        """Drops the pending state: everything is as it was before the step."""
        self._pending_aggregator = None
        self._input = None

    @property
    def keeps_mean(self) -> bool:
        """True if the memory keeps the mean that all ranks receive."""
        return self.memory.keeps_mean

    @property
    def keeps_state(self) -> bool:
        """True if a step leaves something behind that later steps read."""
        return bool(self.memory_state or self.aggregator_state)

    def set_input(self, ef: EFInput | None) -> None:
        """Notes the input of the rounds that are under way, for the non-finite guard."""
        self._input = ef

    def encoded_input(self) -> Tensor:
        """Returns what the first message left of the input, or the input if that is not kept.

        Every entry of the input is in one of them, the message or what is left.
        """
        assert self._input is not None, "no rounds are under way"
        return self._input.grad if self._input.residual_out is None else self._input.residual_out

    def replaced_state(self) -> list[Tensor]:
        """Returns the tensors that this step has put into the aggregator's pending state."""
        pending = self._pending_aggregator
        if not pending:
            return []
        return [x for key, x in pending.items() if x is not self.aggregator_state.get(key)]

    def pending(self) -> tuple[State, State]:
        """Returns the pending states of memory and aggregator."""
        assert self._pending_aggregator is not None, "no step is under way"
        return self._pending_memory, self._pending_aggregator

    def set_pending(self, memory: State, aggregator: State) -> None:
        """Sets the pending states that a replayed CUDA graph has written."""
        self._pending_memory, self._pending_aggregator = memory, aggregator

    def drop_nonfinite(self) -> None:
        """Resets the memory's pending state to the committed one if it is not finite."""
        if not self._pending_memory:
            return
        finite = torch.stack([t.isfinite().all() for t in self._pending_memory.values()]).all()
        for key, tensor in self._pending_memory.items():
            self._pending_memory[key] = torch.where(finite, tensor, self.memory_state[key])

    def reconfigure(self, compressor: Compressor, aggregator: Aggregator) -> None:
        """Continues with another setting of the method; keeps the state that still fits."""
        assert self._pending_aggregator is None, "a lane can change only between two steps"
        self.compressor, self.aggregator = compressor, aggregator
        self._note_constants()
        for key, fresh in aggregator.state(self.ctx, self.device).items():
            self.aggregator_state[key] = _resized(self.aggregator_state.get(key), fresh)

    def unsent(self, *, with_memory: bool) -> list[Tensor]:
        """Returns what waits to be sent in the aggregator's state, and in the memory if asked."""
        keys = [key for key in self.aggregator.unsent_keys if key in self.aggregator_state]
        waiting = [self.aggregator_state[key] for key in keys]
        kept = self.memory.unsent(self.memory_state) if with_memory else None
        return waiting if kept is None else [kept, *waiting]

    def rescale(self, factor: float) -> None:
        """Multiplies what waits to be sent."""
        self.memory.rescale(self.memory_state, factor)
        if self.memory.is_debt:
            _multiply(self.aggregator_state, self.aggregator.unsent_keys, factor)

    def scale_loss(self, factor: float) -> None:
        """Multiplies all state that is in units of the gradient."""
        _multiply(self.memory_state, self.memory.loss_scaled_keys, factor)
        _multiply(self.aggregator_state, self.aggregator.loss_scaled_keys, factor)

    def _new_memory(self) -> State:
        if not self.reversible:
            return self.memory_state
        return self.memory.state(self.ctx.numel, self.device)


def _multiply(state: State, keys: Sequence[str], factor: float) -> None:
    for key in keys:
        if key in state:
            state[key].mul_(factor)


def _resized(old: Tensor | None, fresh: Tensor) -> Tensor:
    """Returns the old state in the shape of the fresh, where only the last dimension differs."""
    if old is None or old.dim() != fresh.dim() or old.shape[:-1] != fresh.shape[:-1]:
        return fresh
    columns = old.shape[-1]
    return torch.cat([old, fresh[..., columns:]], dim=-1)[..., : fresh.shape[-1]].contiguous()


def lane_rounds(grad: Tensor, lane: Lane) -> Rounds:
    """Replaces `grad` by the mean over ranks; what was not sent becomes the next residual."""
    pending_memory, pending_aggregator = lane.begin_step()
    ef = lane.memory.before(_flat(grad), lane.memory_state, pending_memory)
    norm = has_gradient = None
    if lane.ctx.step % lane.sample_every == 0:
        ef, norm = _with_norm(ef)
        has_gradient = ef.gradient().any()
    lane.set_input(ef)
    mean = yield from lane.aggregator.rounds(ef, pending_aggregator, lane.ctx)
    # Its tensors may be temporary, and other buckets are still to come.
    lane.set_input(None)
    mean = lane.memory.after(ef, mean, lane.memory_state, pending_memory)
    if mean.data_ptr() != grad.data_ptr():
        grad.copy_(mean.view(grad.shape))
    if norm is not None and has_gradient is not None and ef.residual_out is not None:
        error = ef.residual_out.norm()
        lane.relative_error = torch.where(norm > 0, error / norm, 0.0)
        # A residual without a gradient is no sample of what compressing gradients loses.
        lane.sampled_error = torch.stack([error, norm]).square() * has_gradient
    return mean


class BucketResult(NamedTuple):
    """The results of a bucket's lanes, and what was averaged along with them."""

    means: list[Tensor]
    nonfinite: Flag | None = None
    """True if all ranks must skip the step, if the guard is on."""
    corrupted: Flag | None = None
    """True if this rank received other values than its peers may have, if the guard is on."""
    statistics: Tensor | None = None


def run_rounds(
    rounds: Sequence[Rounds],
    guard: NonFiniteGuard | None = None,
    piggyback: Piggyback | None = None,
) -> CollectiveProgram[BucketResult]:
    """Runs the rounds of all lanes side by side: each round is one collective per kind.

    The guard's flag and the statistics share these collectives. A CUDA graph can capture the work
    between two of them.
    """
    if guard is not None:
        guard.begin()
    means: dict[int, Tensor] = {}
    answers: Mapping[int, Answer | None] = dict.fromkeys(range(len(rounds)))
    while requests := _advance(rounds, answers, means):
        extra: dict[int, Request] = {}
        if guard is not None:
            extra |= guard.requests(requests)
        if piggyback is not None:
            extra |= piggyback.requests(requests.values())
        served: dict[int, Answer] = {}
        for batch in batches({**requests, **extra}):
            received: list[Tensor] = []
            if batch.between is not None and batch.collective is not None:
                received = yield from internode_collective(batch.collective, batch.between)
            elif batch.collective is not None:
                received = yield batch.collective
            served |= batch.unbatch(received)
        if piggyback is not None and (numbers := served.pop(STATISTICS, None)) is not None:
            piggyback.receive(numbers)
        if guard is not None:
            guard.receive(served.pop(GUARD, None), requests, served)
        answers = served
    if guard is not None:
        guard.finish(means)
    return BucketResult(
        [means[lane] for lane in range(len(rounds))],
        None if guard is None else guard.flag,
        None if guard is None else guard.corrupted,
        None if piggyback is None else piggyback.mean,
    )


def _advance(
    rounds: Sequence[Rounds], answers: Mapping[int, Answer | None], means: dict[int, Tensor]
) -> dict[int, Request]:
    """Sends lanes their answers; returns their next requests, and notes the means of the others."""
    requests: dict[int, Request] = {}
    for lane, answer in answers.items():
        try:
            requests[lane] = next(rounds[lane]) if answer is None else rounds[lane].send(answer)
        except StopIteration as end:
            means[lane] = end.value
    return requests


def _flat(grad: Tensor) -> Tensor:
    """Returns the gradient as flat float32, as a view if it is contiguous float32 already."""
    check_floating(grad)
    if grad.dtype == torch.float32 and grad.is_contiguous():
        return grad.view(-1)
    return grad.to(torch.float32, memory_format=torch.contiguous_format, copy=True).view(-1)


def _with_norm(ef: EFInput) -> tuple[EFInput, Tensor]:
    """Returns the input with room for the compression error, and the norm of what is encoded."""
    if ef.residual is None:
        return ef._replace(residual_out=torch.empty_like(ef.grad)), ef.grad.norm()
    return ef, torch.add(ef.grad, ef.residual, alpha=ef.decay).norm()
