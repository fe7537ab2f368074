"""The exchange of one rank with mirrored peers: encode and decode times and collectives.

Only the ranks of one node run; all other ranks are mirrored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.mirror import CollectiveRecord, MirrorComm, UnknownAnswer
from gradwire.engine.chunks import CHUNK_BYTES
from gradwire.engine.engine import Engine
from gradwire.engine.plan import Plan
from gradwire.errors import WireError
from gradwire.exchange.sharded import bounds
from gradwire.integrations.bucketing import default_least_bytes
from gradwire.perfmodel.compute import Bucket
from gradwire.perfmodel.timers import CacheEvictor, Clock, clock_of


class MessageCost(NamedTuple):
    """The cost of one message's exchange: encode, collectives, decode, collectives ... decode.

    If the last decoding could not be measured, its time is that of the work before it.
    """

    codec_s: tuple[float, ...]
    """Encode and decode times, one more than `calls`."""
    calls: tuple[tuple[CollectiveRecord, ...], ...]
    bucket: int = 0
    """Number of the last bucket whose gradients it holds."""


class _Group(NamedTuple):
    """Gradients that are exchanged together, and the number of their last bucket."""

    gradients: Bucket
    bucket: int


class MirroredCluster:
    """Runs the ranks of the first node of `size` ranks; only rank 0 is timed."""

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        size: int,
        first_step: int = 0,
        clock: Clock | None = None,
    ) -> None:
        ranks = range(plan.node or 1)
        self.device = next(iter(tensors.values())).device
        self.is_pipelined = self.device.type == "cpu"
        """Whether a message is encoded while others are on the wire."""
        plan = _in_chunks(plan, self.device)
        self._least_bytes = default_least_bytes(is_direct=True, has_rounds=plan.has_rounds)
        self._engines = [Engine(plan, tensors, rank, size, seed=0) for rank in ranks]
        lanes = [*self._engines[0].lanes.values()]
        alike = _ranks_with_equal_shards([lane.ctx.numel for lane in lanes], size)
        self.mirrors = [MirrorComm(size, rank, alike) for rank in ranks]
        for lane in (lane for engine in self._engines for lane in engine.lanes.values()):
            lane.ctx = lane.ctx._replace(step=first_step)
        self._clock = clock
        self._in_place = self.device.type == "cuda"
        self._copies: dict[tuple[int, int], Bucket] = {}
        self._cache_evictor = CacheEvictor(self.device)

    def step(
        self, buckets: Sequence[Bucket], ends: Sequence[int] | None = None
    ) -> tuple[list[MessageCost], float]:
        """Exchanges copies of all gradients; message i at most up to collective number `ends[i]`.

        Returns the costs of rank 0's messages, and the bytes that it sent.
        """
        before = self.mirrors[0].meter.sent_bytes
        costs: list[MessageCost] = []
        for number, group in enumerate(self._groups(buckets)):
            # A training step leaves cold caches, too.
            self._cache_evictor.evict()
            clock = self._clock or clock_of(self.device)
            programs = [
                engine.bucket_programs(*self._copy(rank, number, group.gradients))
                for rank, engine in enumerate(self._engines)
            ]
            for of_ranks in zip(*programs, strict=True):
                cost = self._run(of_ranks, clock, ends[len(costs)] if ends else None)
                costs.append(cost._replace(bucket=group.bucket))
        for engine in self._engines:
            engine.end_step()
            engine.commit_step()
        return costs, self.mirrors[0].meter.sent_bytes - before

    def _groups(self, buckets: Sequence[Bucket]) -> list[_Group]:
        """Merges buckets with short messages with the next, as `attach` does."""
        groups: list[_Group] = []
        names: list[str] = []
        gradients: list[Tensor] = []
        for number, bucket in enumerate(buckets):
            names, gradients = [*names, *bucket.names], [*gradients, *bucket.gradients]
            is_last = number == len(buckets) - 1
            if is_last or self._engines[0].message_bytes(names) >= self._least_bytes:
                groups.append(_Group(Bucket(names, gradients), number))
                names, gradients = [], []
        return groups

    def close(self) -> None:
        """Frees the CUDA graphs of the engines."""
        for engine in self._engines:
            engine.drop_cuda_graphs()

    def _copy(self, rank: int, number: int, bucket: Bucket) -> Bucket:
        """Returns a copy of the bucket that a rank may overwrite.

        On a GPU it has the same address at every step, as DDP's buckets do, so that the step is
        captured as a CUDA graph: a replay takes a fraction of the time.
        """
        if not self._in_place:
            return bucket.copy()
        copy = self._copies.get((rank, number)) or bucket.copy()
        self._copies[rank, number] = copy
        torch._foreach_copy_(copy.gradients, bucket.gradients)
        return copy

    def _run(
        self, programs: Sequence[CollectiveProgram[None]], clock: Clock, end: int | None
    ) -> MessageCost:
        """Runs the programs to their end, or as far as mirrored peers can answer."""
        spans: list[tuple[int, int]] = []
        calls: list[tuple[CollectiveRecord, ...]] = []
        answers: list[list[Tensor] | None] | None = [None] * len(programs)
        while answers is not None and len(calls) != end:
            start = clock.mark()
            results = [_advance(programs[0], answers[0])]
            if results[0] is not _UNREADABLE:
                spans.append((start, clock.mark()))
            results += [_advance(t, a) for t, a in zip(programs[1:], answers[1:], strict=True)]
            collectives = [call for call in results if isinstance(call, Collective)]
            if len(collectives) < len(programs):
                break
            records, answers = self._answer_all(collectives)
            calls.append(records)
        for program in programs:
            program.close()
        codec_s = [clock.seconds(*span) for span in spans]
        return MessageCost(
            tuple(codec_s + codec_s[-1:] * (len(calls) + 1 - len(codec_s))), tuple(calls)
        )

    def _answer_all(
        self, calls: Sequence[Collective]
    ) -> tuple[tuple[CollectiveRecord, ...], list[list[Tensor] | None] | None]:
        """Returns rank 0's records and each rank's answer; None if mirrored peers have none."""
        before = len(self.mirrors[0].records)
        try:
            answers = [g.run(call) for g, call in zip(self.mirrors, calls, strict=True)]
        except UnknownAnswer:
            return tuple(self.mirrors[0].records[before:]), None
        subgroup = calls[0].subgroup
        if calls[0].kind == "gather" and subgroup is not None and not subgroup.internode:
            answers = [[call.buffers[0] for call in calls] for _ in calls]
        return tuple(self.mirrors[0].records[before:]), [*answers]


def _in_chunks(plan: Plan, device: torch.device) -> Plan:
    """Returns the plan with chunks as `attach` makes them by default."""
    if plan.chunk_bytes or device.type != "cpu":
        return plan
    return replace(plan, chunk_bytes=CHUNK_BYTES)


def _ranks_with_equal_shards(numels: Sequence[int], size: int) -> frozenset[int]:
    """Returns the ranks whose shards of all tensors are as long as rank 0's."""
    shards = zip(*(bounds(numel, size) for numel in numels), strict=True)
    lengths = [[stop - start for start, stop in of_rank] for of_rank in shards]
    return frozenset(rank for rank, own in enumerate(lengths) if own == lengths[0])


class _Stopped:
    """The reason why a program makes no further collective."""


_ENDED, _UNREADABLE = _Stopped(), _Stopped()


def _advance(
    program: CollectiveProgram[None], answer: list[Tensor] | None
) -> Collective | _Stopped:
    """Returns the next collective, or the reason why there is none."""
    try:
        return next(program) if answer is None else program.send(answer)
    except StopIteration:
        return _ENDED
    except WireError:
        # The last message, of variable length, was read as that of a shard of another size.
        return _UNREADABLE
