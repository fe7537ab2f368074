"""One rank of a small step, which can be made to hear anything in any of its rounds."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.bench.fuzz.guard import Guarded
from laconic.bench.fuzz.target import ROOM_BYTES, Case, Place, Target, same_bits
from laconic.comm.base import Conversation
from laconic.comm.simulated import Simulated
from laconic.plan import make_plan, open_lane
from laconic.step import exchange, together
from laconic.types import Turn

SHAPE = (13, 17)
"""Small, so that messages are many; odd, so that last bytes and shards are not full."""


class Heard(NamedTuple):
    """What a rank was answered in one call."""

    kind: str
    buffers: list[Tensor]


class Listener(Target):
    """Rank 0 of a case, and what it heard in a step where nobody lied."""

    def __init__(self, case: Case) -> None:
        plan = make_plan(case.spec, None, case.exchange, [torch.zeros(SHAPE)], case.ranks)
        # Not step 0, in which the error is measured too.
        turns = [Turn(SHAPE, rank, case.ranks, step=1) for rank in range(case.ranks)]
        cpu = torch.device("cpu")
        self._lanes = [
            open_lane("w", plan.compressor, plan.memory, plan.exchange, turn, cpu) for turn in turns
        ]
        dice = torch.Generator().manual_seed(0)
        self._grads = [torch.randn(SHAPE, generator=dice) for _ in turns]
        self._room, self._mail = Guarded(ROOM_BYTES), Guarded(ROOM_BYTES)
        self._tape: list[Heard] = []
        talks = [self._talk(rank, grad.clone()) for rank, grad in enumerate(self._grads)]
        Simulated(case.ranks).run([_taped(talks[0], self._tape), *talks[1:]])
        self.places = [
            Place(call, rank, said.clone().view(torch.uint8), heard.kind in ("mean", "broadcast"))
            for call, heard in enumerate(self._tape)
            for rank, said in enumerate(heard.buffers)
        ]
        self._before = self._remembers()

    def hears(self, place: Place, message: Tensor, *, at_end: bool = True) -> Tensor:
        grad = self._room.hold(self._grads[0].view(-1), at_end=at_end).view(SHAPE)
        talk = self._talk(0, grad)
        next(talk)
        for number, (kind, buffers) in enumerate(self._tape):
            # Means are the receiver's to write on; messages are not.
            answer = [b.clone() for b in buffers] if kind == "mean" else list(buffers)
            if number == place.call:
                held = self._mail.hold(message, at_end=at_end)
                answer[place.rank] = held.view(answer[place.rank].dtype)
            try:
                talk.send(answer)
            except StopIteration:
                return grad
        raise AssertionError("the conversation goes on after the last answer")

    def spoilt(self) -> str:
        pairs = zip(self._before, self._remembers(), strict=True)
        if not all(same_bits(one, other) for one, other in pairs):
            return "what the lane remembers has changed"
        heard = [b.view(torch.uint8) for one in self._tape for b in one.buffers]
        if not all(same_bits(p.said, b) for p, b in zip(self.places, heard, strict=True)):
            return "a message was written on"
        return ""

    def _remembers(self) -> list[Tensor]:
        """Copies of all that the lane keeps for later steps."""
        lane = self._lanes[0]
        return [t.clone() for t in (*lane.kept.values(), *lane.talk.values())]

    def _talk(self, rank: int, grad: Tensor) -> Conversation[list[Tensor]]:
        return together([exchange(grad, self._lanes[rank])])


def _taped(talk: Conversation[list[Tensor]], tape: list[Heard]) -> Conversation[list[Tensor]]:
    answer: Sequence[Tensor] | None = None
    while True:
        try:
            call = next(talk) if answer is None else talk.send(list(answer))
        except StopIteration as end:
            result: list[Tensor] = end.value
            return result
        answer = yield call
        tape.append(Heard(call.kind, [buffer.clone() for buffer in answer]))
