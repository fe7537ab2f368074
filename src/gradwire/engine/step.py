"""The main path: one gradient's way to the wire and back, and a whole bucket's in one message.

A lane is the way of one parameter: its compressor under an exchange, its memory, and their state.
`exchange` takes a gradient along its lane. `together` takes the lanes of a bucket side by side, so
that each round of all of them is one buffer and one collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.base import Aggregator, Compressor, Memory
from gradwire.comm.base import CollectiveProgram
from gradwire.engine.batching import carry
from gradwire.engine.nonfinite import ALARM, NonFiniteGuard
from gradwire.engine.piggyback import CENSUS, Piggyback
from gradwire.kernels.validation import check_floating
from gradwire.types import Answer, EFInput, EncodeContext, Request, Rounds, State


class BucketResult(NamedTuple):
    """What a bucket's conversation leaves beside its gradients' means."""

    alarm: Tensor | None = None
    """Whether any rank's gradient was not finite, if that was looked for."""
    agreed: Tensor | None = None
    """What the census has brought, if there was one."""


SAMPLE_EVERY = 100
"""The relative error costs extra passes over memory, so it is measured once in so many steps."""


@dataclass
class Lane:
    """The way of one parameter's gradients, and what it remembers of the last one.

    What a step would have it remember is a draft until `keep`.
    """

    name: str
    compressor: Compressor
    aggregator: Aggregator
    """Who holds the conversation: the compressor itself, or an exchange around it."""
    memory: Memory
    ctx: EncodeContext
    device: torch.device
    careful: bool = True
    """Whether a step can be taken back; costs the memory's room twice."""
    memory_state: State = field(init=False)
    """The memory's state."""
    aggregator_state: State = field(init=False)
    """The talker's state."""
    message_bytes: int = field(init=False)
    """About as many as a message has: kept, since it is asked for at every step."""
    relative_error: Tensor | None = None
    sample_every: int = field(init=False, default=SAMPLE_EVERY)
    lost: Tensor | None = field(init=False, default=None)  # [2]
    """Sums of squares of what the last step left unsaid and of all it had to say, if sampled."""
    _pending_memory: State = field(init=False)
    _pending_aggregator: State | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.memory_state = self.memory.state(self.ctx.numel, self.device)
        self.aggregator_state = self.aggregator.state(self.ctx, self.device)
        self._pending_memory = self._room()
        self.message_bytes = self.compressor.nbytes(self.ctx.shape)

    def begin(self) -> tuple[State, State]:
        """Room for what the memory and the talker will remember of the coming step."""
        if not self.careful:
            self._pending_memory = self.memory_state
        elif (
            self._pending_memory.keys() != self.memory_state.keys()
            or self._pending_memory is self.memory_state
        ):
            self._pending_memory = self._room()
        self._pending_aggregator = dict(self.aggregator_state)
        return self._pending_memory, self._pending_aggregator

    def keep(self) -> None:
        """The step counts: what it drafted is what is remembered from now on."""
        if self._pending_aggregator is not None:
            self.memory_state, self._pending_memory = self._pending_memory, self.memory_state
            self.aggregator_state, self._pending_aggregator = self._pending_aggregator, None
            self.ctx = self.ctx._replace(step=self.ctx.step + 1)

    def drafted(self) -> tuple[State, State]:
        """What the memory and the talker will remember if the step counts."""
        assert self._pending_aggregator is not None, "no step is under way"
        return self._pending_memory, self._pending_aggregator

    def draft(self, then: State, talk: State) -> None:
        """Takes over what a recorded step has written for its draft."""
        self._pending_memory, self._pending_aggregator = then, talk

    def mend(self) -> None:
        """The memory's draft becomes what is kept already, where it is not finite."""
        sound = [tensor.isfinite().all() for tensor in self._pending_memory.values()]
        for key, tensor in self._pending_memory.items():
            self._pending_memory[key] = torch.where(
                torch.stack(sound).all(), tensor, self.memory_state[key]
            )

    def forget(self) -> None:
        """The step does not count: all is as it was before it."""
        self._pending_aggregator = None

    def redirect(self, compressor: Compressor, aggregator: Aggregator) -> None:
        """Goes on with another setting of the method; all that still fits is remembered."""
        assert self._pending_aggregator is None, "a lane changes between two steps"
        self.compressor, self.aggregator = compressor, aggregator
        self.message_bytes = compressor.nbytes(self.ctx.shape)
        for key, fresh in aggregator.state(self.ctx, self.device).items():
            self.aggregator_state[key] = _fitted(self.aggregator_state.get(key), fresh)

    def unsent_keys(self, *, kept: bool) -> list[Tensor]:
        """What waits to be sent: in the talker's state, and what is kept if that is asked for."""
        waiting = self.memory.unsent(self.memory_state) if kept else None
        talk = [
            self.aggregator_state[key]
            for key in self.aggregator.unsent_keys
            if key in self.aggregator_state
        ]
        return talk if waiting is None else [waiting, *talk]

    def rescale(self, factor: float) -> None:
        """Multiplies what waits to be sent."""
        self.memory.rescale(self.memory_state, factor)
        if self.memory.is_debt:
            _multiply(self.aggregator_state, self.aggregator.unsent_keys, factor)

    def change_units(self, factor: float) -> None:
        """Multiplies all that is in units of the gradient."""
        _multiply(self.memory_state, self.memory.loss_scaled_keys, factor)
        _multiply(self.aggregator_state, self.aggregator.loss_scaled_keys, factor)

    def _room(self) -> State:
        return self.memory.state(self.ctx.numel, self.device) if self.careful else self.memory_state


def _multiply(state: State, keys: Sequence[str], factor: float) -> None:
    for key in keys:
        if key in state:
            state[key].mul_(factor)


def _fitted(old: Tensor | None, fresh: Tensor) -> Tensor:
    """The old in the form of the fresh: where only columns were added or dropped, with the rest."""
    if old is None or old.dim() != fresh.dim() or old.shape[:-1] != fresh.shape[:-1]:
        return fresh
    columns = old.shape[-1]
    return torch.cat([old, fresh[..., columns:]], dim=-1)[..., : fresh.shape[-1]].contiguous()


def exchange(grad: Tensor, lane: Lane) -> Rounds:
    """Replaces `grad` by its mean over all ranks, as far as the lane's compressor can say it."""
    then, talk = lane.begin()
    ef = lane.memory.before(_flat(grad), lane.memory_state, then)
    norm = stirs = None
    if lane.ctx.step % lane.sample_every == 0:
        ef, norm = _sampled(ef)
        stirs = ef.gradient().any()
    mean = yield from lane.aggregator.rounds(ef, talk, lane.ctx)
    mean = lane.memory.after(ef, mean, lane.memory_state, then)
    if mean.data_ptr() != grad.data_ptr():
        grad.copy_(mean.view(grad.shape))
    if norm is not None and stirs is not None and ef.residual_out is not None:
        residual_out = ef.residual_out.norm()
        lane.relative_error = torch.where(norm > 0, residual_out / norm, 0.0)
        # Where no gradient came, only a residual, it is no sample of what gradients lose.
        lane.lost = torch.stack([residual_out, norm]).square() * stirs
    return mean


def together(
    talks: Sequence[Rounds], alarm: NonFiniteGuard | None = None, census: Piggyback | None = None
) -> CollectiveProgram[list[Tensor]]:
    """Leads all talks at once: what they ask for in one round goes out together.

    An alarm and a census travel along with them.
    """
    means: dict[int, Tensor] = {}
    answers: dict[int, Answer | None] = dict.fromkeys(range(len(talks)))
    while answers:
        waiting: dict[int, Request] = {}
        for lane, answer in answers.items():
            try:
                waiting[lane] = next(talks[lane]) if answer is None else talks[lane].send(answer)
            except StopIteration as end:
                means[lane] = end.value
        asked = dict(waiting)
        if alarm is not None:
            asked |= alarm.asks(waiting)
        if census is not None:
            asked |= census.asks(waiting.values())
        heard = yield from carry(asked)
        if ALARM in heard and alarm is not None:
            alarm.hears(heard.pop(ALARM))
        if CENSUS in heard and census is not None:
            census.hears(heard.pop(CENSUS))
        answers = dict(heard)
    return [means[lane] for lane in range(len(talks))]


def _flat(grad: Tensor) -> Tensor:
    """The gradient as flat float32: itself where it is that already."""
    check_floating(grad)
    if grad.dtype == torch.float32 and grad.is_contiguous():
        return grad.view(-1)
    return grad.to(torch.float32, memory_format=torch.contiguous_format, copy=True).view(-1)


def _sampled(ef: EFInput) -> tuple[EFInput, Tensor]:
    """The same with room for what is left, and the norm of all there is to say."""
    if ef.residual is None:
        return ef._replace(residual_out=torch.empty_like(ef.grad)), ef.grad.norm()
    return ef, torch.add(ef.grad, ef.residual, alpha=ef.decay).norm()
