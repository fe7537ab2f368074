"""The main path: one gradient's way to the wire and back, and many of them in one message.

A lane is the way of one parameter: its compressor under an exchange, its memory, and their state.
`exchange` takes a gradient along its lane. `together` takes the lanes of a bucket side by side, so
that each round of all of them is one buffer and one collective.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from laconic.comm.base import Call, Conversation
from laconic.contract import Compressor, Memory, Talker
from laconic.types import (
    Answer,
    Broadcast,
    Gather,
    Given,
    Mean,
    Request,
    Rounds,
    Scatter,
    State,
    Turn,
)
from laconic.wire.layout import join, pack, packed_bytes, secrets, split, unpack

R = TypeVar("R", Mean, Gather, Scatter, Broadcast)

SAMPLE_EVERY = 100
"""The relative error costs extra passes over memory, so it is measured once in so many steps."""


@dataclass
class Lane:
    """The way of one parameter's gradients, and what it remembers of the last one."""

    name: str
    compressor: Compressor
    talker: Talker
    memory: Memory
    turn: Turn
    device: torch.device
    kept: State = field(init=False)
    """The memory's state."""
    talk: State = field(init=False)
    """The state of the compressor or the exchange around it."""
    relative_error: Tensor | None = None

    def __post_init__(self) -> None:
        self.kept = self.memory.state(self.turn.numel, self.device)
        self.talk = self.talker.state(self.turn, self.device)


def exchange(grad: Tensor, lane: Lane) -> Rounds:
    """Replaces `grad` by its mean over all ranks, as far as the lane's compressor can say it."""
    x = _flat(grad)
    given = lane.memory.before(x, lane.kept)
    before = None
    if lane.turn.step % SAMPLE_EVERY == 0:
        given, before = _sampled(given)
    mean = yield from lane.talker.rounds(given, lane.talk, lane.turn)
    lane.memory.after(given, lane.kept)
    if mean.data_ptr() != grad.data_ptr():
        grad.copy_(mean.view(grad.shape))
    if before is not None and given.left is not None:
        lane.relative_error = torch.where(before > 0, given.left.norm() / before, 0.0)
    lane.turn = lane.turn._replace(step=lane.turn.step + 1)
    return mean


def _flat(grad: Tensor) -> Tensor:
    """The gradient as flat float32: itself where it is that already."""
    if grad.dtype == torch.float32 and grad.is_contiguous():
        return grad.view(-1)
    return grad.to(torch.float32, memory_format=torch.contiguous_format, copy=True).view(-1)


def _sampled(given: Given) -> tuple[Given, Tensor]:
    """The same, with room for what is left, and the norm of all there is to say."""
    left = torch.empty_like(given.x) if given.left is None else given.left
    if given.residual is None:
        return given._replace(left=left), given.x.norm()
    return given, torch.add(given.x, given.residual, alpha=given.decay).norm()


def together(talks: Sequence[Rounds]) -> Conversation[list[Tensor]]:
    """Leads all talks at once: requests of one kind in one round become one call."""
    results: dict[int, Tensor] = {}
    waiting: dict[int, Request] = {}
    answers: dict[int, Answer | None] = dict.fromkeys(range(len(talks)))
    while answers:
        for lane, answer in answers.items():
            try:
                waiting[lane] = next(talks[lane]) if answer is None else talks[lane].send(answer)
            except StopIteration as end:
                results[lane] = end.value
        answers = {}
        # The same order of kinds on every rank, whatever the lanes.
        means = _of_kind(waiting, Mean)
        answers.update(zip(means, (yield from _mean(means.values())), strict=True))
        gathers = _of_kind(waiting, Gather)
        answers.update(zip(gathers, (yield from _gather(gathers.values())), strict=True))
        scatters = _of_kind(waiting, Scatter)
        answers.update(zip(scatters, (yield from _scatter(scatters.values())), strict=True))
        for root in sorted({r.root for r in waiting.values() if isinstance(r, Broadcast)}):
            told = {i: r for i, r in _of_kind(waiting, Broadcast).items() if r.root == root}
            answers.update(zip(told, (yield from _broadcast(told.values())), strict=True))
        waiting = {}
    return [results[lane] for lane in range(len(talks))]


def _of_kind(waiting: dict[int, Request], kind: type[R]) -> dict[int, R]:
    return {lane: r for lane, r in waiting.items() if isinstance(r, kind)}


def _mean(requests: Iterable[Mean]) -> Conversation[list[Answer]]:
    requests = list(requests)
    parts = [part for request in requests for part in request.parts]
    if sum(part.numel() for part in parts):
        [flat] = yield Call("mean", [join(parts)])
        parts = split(flat, parts)
    means = iter(parts)
    return [[tuple(next(means) for _ in request.parts)] for request in requests]


def _gather(requests: Iterable[Gather]) -> Conversation[list[Answer]]:
    requests = list(requests)
    if not requests:
        return []
    buffer = pack([r.parts for r in requests], [r.layout for r in requests])
    ranks = range(len(requests[0].layouts))
    layouts = [[r.layouts[rank] for r in requests] for rank in ranks]
    sizes = None if secrets(layouts[0]) else [packed_bytes(None, row) for row in layouts]
    silent = sizes is not None and not any(sizes)
    buffers = [buffer for _ in ranks] if silent else (yield Call("gather", [buffer], sizes))
    heard = [unpack(b, row) for b, row in zip(buffers, layouts, strict=True)]
    return [[heard[rank][i] for rank in ranks] for i in range(len(requests))]


def _scatter(requests: Iterable[Scatter]) -> Conversation[list[Answer]]:
    requests = list(requests)
    if not requests:
        return []
    ranks = range(len(requests[0].messages))
    buffers = [
        pack([r.messages[rank] for r in requests], [r.layouts[rank] for r in requests])
        for rank in ranks
    ]
    mine = [r.layouts[r.rank] for r in requests]
    sizes = None if secrets(mine) else [packed_bytes(None, mine) for _ in ranks]
    heard = [unpack(b, mine) for b in (yield Call("scatter", buffers, sizes))]
    return [[heard[rank][i] for rank in ranks] for i in range(len(requests))]


def _broadcast(requests: Iterable[Broadcast]) -> Conversation[list[Answer]]:
    requests = list(requests)
    layouts = [r.layout for r in requests]
    assert not secrets(layouts), "a broadcast needs lengths that all ranks know"
    buffer = pack([r.parts for r in requests], layouts)
    [heard] = yield Call("broadcast", [buffer], root=requests[0].root)
    return [[parts] for parts in unpack(heard, layouts)]
