"""Exchange cost: encode and decode time and collectives of one rank, measured with mirrored peers.

Only the ranks of one node run; all other ranks are mirrored. Costs of large worlds are extrapolated
from small ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.mirror import Ghost, Said, Unheard
from gradwire.engine.cuda_graphs import BEFORE_REPLAYS
from gradwire.engine.engine import Engine
from gradwire.engine.plan import Plan
from gradwire.errors import WireError
from gradwire.exchange.sharded import bounds
from gradwire.perfmodel.compute import Bucket
from gradwire.perfmodel.sampling import SamplingClock, sampled
from gradwire.perfmodel.timers import Clock, Cold, clock_of
from gradwire.spec import find_layers, read_settings


class Talk(NamedTuple):
    """One bucket's exchange: work, calls, work, calls ... work.

    Where the last work could not be rehearsed it is as long as the one before.
    """

    works_s: tuple[float, ...]
    calls: tuple[tuple[Said, ...], ...]


class World:
    """The ranks of the first node among `size`; only rank 0 is timed, by a clock of its own."""

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        size: int,
        first_step: int = 0,
        clock: Clock | None = None,
    ) -> None:
        ranks = range(plan.node() or 1)
        alike = _alike([tensor.numel() for tensor in tensors.values()], size)
        self.ghosts = [Ghost(size, rank, alike) for rank in ranks]
        self._lanes = [Engine(plan, tensors, rank, size, seed=0) for rank in ranks]
        for lane in (lane for lanes in self._lanes for lane in lanes.lanes.values()):
            lane.ctx = lane.ctx._replace(step=first_step)
        self.device = next(iter(tensors.values())).device
        self._clock = clock
        self._lies_still = self.device.type == "cuda"
        self._rooms: dict[tuple[int, int], Bucket] = {}
        self._caches = Cold(self.device)

    def step(
        self, buckets: Sequence[Bucket], ends: Sequence[int] | None = None
    ) -> tuple[list[Talk], float]:
        """Exchanges copies of all gradients; bucket i at most up to call number `ends[i]`.

        Returns rank 0's talks, and the bytes that it sent.
        """
        before = self.ghosts[0].meter.sent_bytes
        talks = []
        for number, bucket in enumerate(buckets):
            # As a training step would have left them.
            self._caches.cool()
            clock = self._clock or clock_of(self.device)
            copies = [self._copy(rank, number, bucket) for rank in range(len(self._lanes))]
            held = [own.talk(*copy) for own, copy in zip(self._lanes, copies, strict=True)]
            talks.append(self._hold(held, clock, ends[number] if ends else None))
        for lanes in self._lanes:
            lanes.finish()
            lanes.settle()
        return talks, self.ghosts[0].meter.sent_bytes - before

    def close(self) -> None:
        """Lets go of what a GPU was to replay."""
        for lanes in self._lanes:
            lanes.close()

    def _copy(self, rank: int, number: int, bucket: Bucket) -> Bucket:
        """What a rank may overwrite; on a GPU in the same place at every step, so it is recorded.

        A link's buckets lie still, too, and what is replayed takes a fraction of the time.
        """
        if not self._lies_still:
            return bucket.copy()
        room = self._rooms.get((rank, number)) or bucket.copy()
        self._rooms[rank, number] = room
        torch._foreach_copy_(room.gradients, bucket.gradients)
        return room

    def _hold(
        self, talks: Sequence[CollectiveProgram[None]], clock: Clock, end: int | None
    ) -> Talk:
        """Leads the conversations to their end, or as far as ghosts can answer."""
        spans: list[tuple[int, int]] = []
        calls: list[tuple[Said, ...]] = []
        answers: list[list[Tensor] | None] | None = [None] * len(talks)
        while answers is not None and len(calls) != end:
            start = clock.mark()
            asked = [_go_on(talks[0], answers[0])]
            if asked[0] is not _UNREADABLE:
                spans.append((start, clock.mark()))
            asked += [_go_on(t, a) for t, a in zip(talks[1:], answers[1:], strict=True)]
            made = [call for call in asked if isinstance(call, Collective)]
            if len(made) < len(talks):
                break
            said, answers = self._answered(made)
            calls.append(said)
        for talk in talks:
            talk.close()
        works_s = [clock.seconds(*span) for span in spans]
        return Talk(tuple(works_s + works_s[-1:] * (len(calls) + 1 - len(works_s))), tuple(calls))

    def _answered(
        self, calls: Sequence[Collective]
    ) -> tuple[tuple[Said, ...], list[list[Tensor] | None] | None]:
        """What rank 0 said, and each rank's answer; None where ghosts have none."""
        before = len(self.ghosts[0].said)
        try:
            answers = [g.answer(call) for g, call in zip(self.ghosts, calls, strict=True)]
        except Unheard:
            return tuple(self.ghosts[0].said[before:]), None
        ring = calls[0].ring
        if calls[0].kind == "gather" and ring is not None and not ring.across:
            answers = [[call.buffers[0] for call in calls] for _ in calls]
        return tuple(self.ghosts[0].said[before:]), [*answers]


def _alike(numels: Sequence[int], size: int) -> frozenset[int]:
    """The ranks whose shards of all tensors are as long as rank 0's."""
    shards = zip(*(bounds(numel, size) for numel in numels), strict=True)
    lengths = [[stop - start for start, stop in of_rank] for of_rank in shards]
    return frozenset(rank for rank, own in enumerate(lengths) if own == lengths[0])


class _Over:
    """Why a conversation does not go on."""


_ENDED, _UNREADABLE = _Over(), _Over()


def _go_on(talk: CollectiveProgram[None], answer: list[Tensor] | None) -> Collective | _Over:
    """The next call, or why there is none."""
    try:
        return next(talk) if answer is None else talk.send(answer)
    except StopIteration:
        return _ENDED
    except WireError:
        # The last message, of secret length, read as one about a shard of another size.
        return _UNREADABLE


FEW, SOME = 2, 16
"""Nodes of worlds small enough to decode all answers; larger ones go on in a straight line."""
_REPEATS, _BRIEF = 4, 2
"""Steps that are timed, and those of small worlds that stand for a large one."""
_FIRST = 1
"""One step in many, number 0 first, also measures its error; these are some of the others."""
_WARM_UPS = 2


@dataclass(frozen=True)
class Rehearsed:
    """The exchange of a step, by bucket, and what one rank sends and asks for in it."""

    talks: tuple[Talk, ...]
    sent_bytes: float
    calls: float
    samples: tuple[tuple[Talk, ...], ...] = ()
    """The talks of every step that was timed, where those were of a world of this size."""


def rehearse(
    plan: Plan, tensors: Mapping[str, Tensor], steps: Sequence[Sequence[Bucket]], size: int
) -> Rehearsed:
    """One rank of `size` exchanges the gradients of some steps, after a warm-up."""
    node = plan.node() or 1
    if size > SOME * node:
        return _rehearse_large(plan, tensors, steps, size)
    return _rehearse(World(plan, tensors, size, _FIRST), steps, _REPEATS)


def _rehearse_large(
    plan: Plan, tensors: Mapping[str, Tensor], steps: Sequence[Sequence[Bucket]], size: int
) -> Rehearsed:
    """The same in a large world, where one step takes as long as it would there.

    So of many equal shards a few are encoded; and the talks end with their last call, and the time
    to decode everybody's answers is extrapolated from two small worlds. On a GPU, where no step of
    a large world is replayed, so is all work that grows with it. Calls and bytes are those of all.
    """
    node = plan.node() or 1
    few = _rehearse(World(plan, tensors, FEW * node, _FIRST), steps, _BRIEF)
    device = next(iter(tensors.values())).device
    clock = SamplingClock(clock_of(device))
    many = _once(World(sampled(plan, clock), tensors, size, _FIRST, clock), steps[0], few)
    if _encodes_once(plan):
        # In one step all caches are cold.
        many = replace(many, talks=tuple(map(_of_few, many.talks, few.talks)))
    grows = device.type == "cuda" and not _encodes_once(plan)
    if not grows and not any(_decodes_all(talk) for talk in few.talks):
        # One answer, however many gave it.
        return _ending(many, [talk.works_s[-1] for talk in few.talks])
    some = _rehearse(World(plan, tensors, SOME * node, _FIRST), steps, _BRIEF)
    lines = [_on_a_line(*pair, size / node) for pair in zip(few.talks, some.talks, strict=True)]
    if grows:
        pairs = zip(lines, many.talks, strict=True)
        return replace(many, talks=tuple(Talk(line, talk.calls) for line, talk in pairs))
    return _ending(many, [line[-1] for line in lines])


def _encodes_once(plan: Plan) -> bool:
    """Whether a rank's work before its last answer is the same among any number of others."""
    layers = find_layers(plan.exchange)
    between = plan.exchange if layers is None else layers.between
    return read_settings(between)[0] in ("mean", "gather")


def _of_few(many: Talk, few: Talk) -> Talk:
    """The calls of many, with the work of few."""
    return Talk(few.works_s, many.calls)


def _ending(rehearsed: Rehearsed, lasts_s: Sequence[float]) -> Rehearsed:
    """The same with other last works."""
    pairs = zip(rehearsed.talks, lasts_s, strict=True)
    talks = tuple(Talk((*talk.works_s[:-1], last_s), talk.calls) for talk, last_s in pairs)
    return replace(rehearsed, talks=talks)


def _decodes_all(talk: Talk) -> bool:
    """Whether the last answer is everybody's."""
    return bool(talk.calls) and talk.calls[-1][-1].kind == "gather"


def _on_a_line(few: Talk, some: Talk, nodes: float) -> tuple[float, ...]:
    """The works of a talk among so many nodes."""
    share = (nodes - FEW) / (SOME - FEW)
    pairs = zip(few.works_s, some.works_s, strict=True)
    works_s = [few_s + max(0.0, some_s - few_s) * share for few_s, some_s in pairs]
    if not _decodes_all(few):
        # What differs here is noise.
        works_s[-1] = min(few.works_s[-1], some.works_s[-1])
    return tuple(works_s)


def _rehearse(world: World, steps: Sequence[Sequence[Bucket]], times: int) -> Rehearsed:
    """The middle of so many steps after a warm-up."""
    # On a GPU a link's steps are replayed, so those are the ones to be timed.
    warm_ups = BEFORE_REPLAYS if world.device.type == "cuda" else _WARM_UPS
    taken = [world.step(steps[step % len(steps)]) for step in range(warm_ups + times)]
    world.close()
    return _summary(taken[-times:])


def _once(world: World, buckets: Sequence[Bucket], like: Rehearsed) -> Rehearsed:
    """One step, without a warm-up, up to the last calls of others like it."""
    taken = world.step(buckets, [len(talk.calls) for talk in like.talks])
    world.close()
    return replace(_summary([taken]), samples=())


def _summary(taken: Sequence[tuple[list[Talk], float]]) -> Rehearsed:
    by_bucket = zip(*(talks for talks, _ in taken), strict=True)
    return Rehearsed(
        tuple(_middle(talks) for talks in by_bucket),
        fmean(sent_bytes for _, sent_bytes in taken),
        fmean(sum(len(call) for talk in talks for call in talk.calls) for talks, _ in taken),
        tuple(tuple(talks) for talks, _ in taken),
    )


def _middle(talks: Sequence[Talk]) -> Talk:
    """The median work of several steps, and the calls of the last."""
    columns = zip(*(talk.works_s for talk in talks), strict=True)
    return Talk(tuple(median(column) for column in columns), talks[-1].calls)
