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

from gradwire.base import Compressor, Memory, Talker
from gradwire.comm.base import Conversation
from gradwire.engine.batching import carry
from gradwire.engine.nonfinite import ALARM, Alarm
from gradwire.engine.piggyback import CENSUS, Census
from gradwire.kernels.validation import check_floating
from gradwire.types import Answer, Given, Request, Rounds, State, Turn


class Ended(NamedTuple):
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
    talker: Talker
    """Who holds the conversation: the compressor itself, or an exchange around it."""
    memory: Memory
    turn: Turn
    device: torch.device
    careful: bool = True
    """Whether a step can be taken back; costs the memory's room twice."""
    kept: State = field(init=False)
    """The memory's state."""
    talk: State = field(init=False)
    """The talker's state."""
    message_bytes: int = field(init=False)
    """About as many as a message has: kept, since it is asked for at every step."""
    relative_error: Tensor | None = None
    sample_every: int = field(init=False, default=SAMPLE_EVERY)
    lost: Tensor | None = field(init=False, default=None)  # [2]
    """Sums of squares of what the last step left unsaid and of all it had to say, if sampled."""
    _then: State = field(init=False)
    _draft: State | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.kept = self.memory.state(self.turn.numel, self.device)
        self.talk = self.talker.state(self.turn, self.device)
        self._then = self._room()
        self.message_bytes = self.compressor.nbytes(self.turn.shape)

    def begin(self) -> tuple[State, State]:
        """Room for what the memory and the talker will remember of the coming step."""
        if not self.careful:
            self._then = self.kept
        elif self._then.keys() != self.kept.keys() or self._then is self.kept:
            self._then = self._room()
        self._draft = dict(self.talk)
        return self._then, self._draft

    def keep(self) -> None:
        """The step counts: what it drafted is what is remembered from now on."""
        if self._draft is not None:
            self.kept, self._then = self._then, self.kept
            self.talk, self._draft = self._draft, None
            self.turn = self.turn._replace(step=self.turn.step + 1)

    def drafted(self) -> tuple[State, State]:
        """What the memory and the talker will remember if the step counts."""
        assert self._draft is not None, "no step is under way"
        return self._then, self._draft

    def draft(self, then: State, talk: State) -> None:
        """Takes over what a recorded step has written for its draft."""
        self._then, self._draft = then, talk

    def mend(self) -> None:
        """The memory's draft becomes what is kept already, where it is not finite."""
        sound = [tensor.isfinite().all() for tensor in self._then.values()]
        for key, tensor in self._then.items():
            self._then[key] = torch.where(torch.stack(sound).all(), tensor, self.kept[key])

    def forget(self) -> None:
        """The step does not count: all is as it was before it."""
        self._draft = None

    def redirect(self, compressor: Compressor, talker: Talker) -> None:
        """Goes on with another setting of the method; all that still fits is remembered."""
        assert self._draft is None, "a lane changes between two steps"
        self.compressor, self.talker = compressor, talker
        self.message_bytes = compressor.nbytes(self.turn.shape)
        for key, fresh in talker.state(self.turn, self.device).items():
            self.talk[key] = _fitted(self.talk.get(key), fresh)

    def owed(self, *, kept: bool) -> list[Tensor]:
        """What waits to be sent: in the talker's state, and what is kept if that is asked for."""
        waiting = self.memory.waiting(self.kept) if kept else None
        talk = [self.talk[key] for key in self.talker.owed if key in self.talk]
        return talk if waiting is None else [waiting, *talk]

    def rescale(self, factor: float) -> None:
        """Multiplies what waits to be sent."""
        self.memory.rescale(self.kept, factor)
        if self.memory.owes:
            _multiply(self.talk, self.talker.owed, factor)

    def change_units(self, factor: float) -> None:
        """Multiplies all that is in units of the gradient."""
        _multiply(self.kept, self.memory.units, factor)
        _multiply(self.talk, self.talker.units, factor)

    def _room(self) -> State:
        return self.memory.state(self.turn.numel, self.device) if self.careful else self.kept


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
    given = lane.memory.before(_flat(grad), lane.kept, then)
    norm = stirs = None
    if lane.turn.step % lane.sample_every == 0:
        given, norm = _sampled(given)
        stirs = given.came().any()
    mean = yield from lane.talker.rounds(given, talk, lane.turn)
    mean = lane.memory.after(given, mean, lane.kept, then)
    if mean.data_ptr() != grad.data_ptr():
        grad.copy_(mean.view(grad.shape))
    if norm is not None and stirs is not None and given.left is not None:
        left = given.left.norm()
        lane.relative_error = torch.where(norm > 0, left / norm, 0.0)
        # Where no gradient came, only a residual, it is no sample of what gradients lose.
        lane.lost = torch.stack([left, norm]).square() * stirs
    return mean


def together(
    talks: Sequence[Rounds], alarm: Alarm | None = None, census: Census | None = None
) -> Conversation[list[Tensor]]:
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


def _sampled(given: Given) -> tuple[Given, Tensor]:
    """The same with room for what is left, and the norm of all there is to say."""
    if given.residual is None:
        return given._replace(left=torch.empty_like(given.x)), given.x.norm()
    return given, torch.add(given.x, given.residual, alpha=given.decay).norm()
