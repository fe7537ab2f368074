"""One rank in a world of ghosts, where its steps can be timed and its calls be listed.

Where ranks form nodes, those of its own node are there: they pass on what nobody else knows.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.comm.base import Call, Conversation
from laconic.comm.ghost import Ghost, Said, Unheard
from laconic.errors import WireError
from laconic.exchange.sharded import bounds
from laconic.forecast.clock import Clock, clock_of
from laconic.forecast.compute import Bucket
from laconic.lanes import Lanes
from laconic.plan import Plan

CACHE_BYTES = 64 << 20
"""More than the caches of a processor hold for one worker."""


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
        self._lanes = [Lanes(plan, tensors, rank, size, seed=0) for rank in ranks]
        for lane in (lane for lanes in self._lanes for lane in lanes.lanes.values()):
            lane.turn = lane.turn._replace(step=first_step)
        self.device = next(iter(tensors.values())).device
        self._clock = clock
        on_cpu, self._lies_still = self.device.type == "cpu", self.device.type == "cuda"
        self._rooms: dict[tuple[int, int], Bucket] = {}
        self._cold = torch.zeros(CACHE_BYTES, dtype=torch.uint8) if on_cpu else None

    def step(
        self, buckets: Sequence[Bucket], ends: Sequence[int] | None = None
    ) -> tuple[list[Talk], float]:
        """Exchanges copies of all gradients; bucket i at most up to call number `ends[i]`.

        Returns rank 0's talks, and the bytes that it sent.
        """
        before = self.ghosts[0].meter.sent_bytes
        talks = []
        for number, bucket in enumerate(buckets):
            self._cool()
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

    def _cool(self) -> None:
        """Takes from a processor's caches what they have of residuals, as a training step would."""
        if self._cold is not None:
            self._cold.add_(1)

    def _hold(self, talks: Sequence[Conversation[None]], clock: Clock, end: int | None) -> Talk:
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
            made = [call for call in asked if isinstance(call, Call)]
            if len(made) < len(talks):
                break
            said, answers = self._answered(made)
            calls.append(said)
        for talk in talks:
            talk.close()
        works_s = [clock.seconds(*span) for span in spans]
        return Talk(tuple(works_s + works_s[-1:] * (len(calls) + 1 - len(works_s))), tuple(calls))

    def _answered(
        self, calls: Sequence[Call]
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


def _go_on(talk: Conversation[None], answer: list[Tensor] | None) -> Call | _Over:
    """The next call, or why there is none."""
    try:
        return next(talk) if answer is None else talk.send(answer)
    except StopIteration:
        return _ENDED
    except WireError:
        # The last message, of secret length, read as one about a shard of another size.
        return _UNREADABLE
