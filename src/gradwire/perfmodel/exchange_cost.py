"""Exchange cost: encode and decode time and collectives of one rank, measured with mirrored peers.

Only the ranks of one node run; all other ranks are mirrored. Costs of large clusters are
extrapolated from small ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.mirror import CollectiveRecord, MirrorComm, UnknownAnswer
from gradwire.engine.cuda_graphs import STEPS_BEFORE_REPLAY
from gradwire.engine.engine import Engine
from gradwire.engine.plan import Plan
from gradwire.errors import WireError
from gradwire.exchange.sharded import bounds
from gradwire.perfmodel.compute import Bucket
from gradwire.perfmodel.sampling import SamplingClock, sample_shards
from gradwire.perfmodel.timers import CacheEvictor, Clock, clock_of


class BucketCost(NamedTuple):
    """The cost of one bucket's exchange: encode, collectives, decode, collectives ... decode.

    If the last decoding could not be measured, its time is that of the work before it.
    """

    codec_s: tuple[float, ...]
    """Encode and decode times, one more than `calls`."""
    calls: tuple[tuple[CollectiveRecord, ...], ...]


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
        alike = _ranks_with_equal_shards([tensor.numel() for tensor in tensors.values()], size)
        self.mirrors = [MirrorComm(size, rank, alike) for rank in ranks]
        self._engines = [Engine(plan, tensors, rank, size, seed=0) for rank in ranks]
        for lane in (lane for engine in self._engines for lane in engine.lanes.values()):
            lane.ctx = lane.ctx._replace(step=first_step)
        self.device = next(iter(tensors.values())).device
        self._clock = clock
        self._in_place = self.device.type == "cuda"
        self._copies: dict[tuple[int, int], Bucket] = {}
        self._cache_evictor = CacheEvictor(self.device)

    def step(
        self, buckets: Sequence[Bucket], ends: Sequence[int] | None = None
    ) -> tuple[list[BucketCost], float]:
        """Exchanges copies of all gradients; bucket i at most up to collective number `ends[i]`.

        Returns the costs of rank 0's buckets, and the bytes that it sent.
        """
        before = self.mirrors[0].meter.sent_bytes
        costs = []
        for number, bucket in enumerate(buckets):
            # A training step leaves cold caches, too.
            self._cache_evictor.evict()
            clock = self._clock or clock_of(self.device)
            copies = [self._copy(rank, number, bucket) for rank in range(len(self._engines))]
            programs = [
                engine.bucket_program(*copy)
                for engine, copy in zip(self._engines, copies, strict=True)
            ]
            costs.append(self._run(programs, clock, ends[number] if ends else None))
        for engine in self._engines:
            engine.end_step()
            engine.commit_step()
        return costs, self.mirrors[0].meter.sent_bytes - before

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
    ) -> BucketCost:
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
        return BucketCost(
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


SMALL_NODES, MEDIUM_NODES = 2, 16
"""Nodes of clusters small enough to decode all answers; larger ones are extrapolated linearly."""
_REPEATS, _FEW_REPEATS = 4, 2
"""Timed steps: of a cluster itself, and of small clusters that a large one is extrapolated from."""
_FIRST_STEP = 1
"""Step 0, and one step in many after it, also measures its error; the timed steps avoid those."""
_WARM_UPS = 2


@dataclass(frozen=True)
class ExchangeCost:
    """The cost of a step's exchange by bucket, and the bytes and collectives of one rank in it."""

    buckets: tuple[BucketCost, ...]
    sent_bytes: float
    calls: float
    samples: tuple[tuple[BucketCost, ...], ...] = ()
    """The costs of every timed step; empty if they were extrapolated."""


def measure_exchange(
    plan: Plan, tensors: Mapping[str, Tensor], steps: Sequence[Sequence[Bucket]], size: int
) -> ExchangeCost:
    """Measures the exchange of some steps' gradients by one rank of `size`, after a warm-up."""
    node = plan.node or 1
    if size > MEDIUM_NODES * node:
        return _measure_large(plan, tensors, steps, size)
    return _measure(MirroredCluster(plan, tensors, size, _FIRST_STEP), steps, _REPEATS)


def _measure_large(
    plan: Plan, tensors: Mapping[str, Tensor], steps: Sequence[Sequence[Bucket]], size: int
) -> ExchangeCost:
    """Measures the exchange in a large cluster, where a full step would take too long.

    Of many equal shards a few are encoded. Buckets end with their last collective, and the time to
    decode the answers of all ranks is extrapolated from two small clusters. On a GPU, where no step
    of a large cluster is replayed, so is all work that grows with the cluster. Collectives and
    bytes are exact.
    """
    node = plan.node or 1
    small = _measure(
        MirroredCluster(plan, tensors, SMALL_NODES * node, _FIRST_STEP), steps, _FEW_REPEATS
    )
    device = next(iter(tensors.values())).device
    clock = SamplingClock(clock_of(device))
    large = _measure_one_step(
        MirroredCluster(sample_shards(plan, clock), tensors, size, _FIRST_STEP, clock),
        steps[0],
        small,
    )
    if _encodes_once(plan):
        # The single step of the large cluster ran without a warm-up.
        large = replace(
            large, buckets=tuple(map(_with_codec_times_of, large.buckets, small.buckets))
        )
    codec_grows = device.type == "cuda" and not _encodes_once(plan)
    if not codec_grows and not any(_ends_with_gather(bucket) for bucket in small.buckets):
        # The answer is one message for any number of ranks.
        return _with_last_codec_s(large, [bucket.codec_s[-1] for bucket in small.buckets])
    medium = _measure(
        MirroredCluster(plan, tensors, MEDIUM_NODES * node, _FIRST_STEP), steps, _FEW_REPEATS
    )
    extrapolated = [
        _extrapolate(*pair, size / node) for pair in zip(small.buckets, medium.buckets, strict=True)
    ]
    if codec_grows:
        pairs = zip(extrapolated, large.buckets, strict=True)
        return replace(
            large, buckets=tuple(BucketCost(line, bucket.calls) for line, bucket in pairs)
        )
    return _with_last_codec_s(large, [line[-1] for line in extrapolated])


def _encodes_once(plan: Plan) -> bool:
    """Returns True if a rank's work before its last answer does not depend on the cluster size."""
    exchanges = {method.exchange.across_nodes.name for method in plan.methods}
    return exchanges <= {"mean", "gather"}


def _with_codec_times_of(large: BucketCost, small: BucketCost) -> BucketCost:
    """Returns the collectives of `large` with the encode and decode times of `small`."""
    return BucketCost(small.codec_s, large.calls)


def _with_last_codec_s(cost: ExchangeCost, last_codec_s: Sequence[float]) -> ExchangeCost:
    """Replaces the last decode time of every bucket."""
    pairs = zip(cost.buckets, last_codec_s, strict=True)
    buckets = tuple(
        BucketCost((*bucket.codec_s[:-1], last_s), bucket.calls) for bucket, last_s in pairs
    )
    return replace(cost, buckets=buckets)


def _ends_with_gather(bucket: BucketCost) -> bool:
    """Returns True if the last answer holds the messages of all ranks."""
    return bool(bucket.calls) and bucket.calls[-1][-1].kind == "gather"


def _extrapolate(small: BucketCost, medium: BucketCost, nodes: float) -> tuple[float, ...]:
    """Returns encode and decode times of a bucket for `nodes` nodes, extrapolated linearly."""
    share = (nodes - SMALL_NODES) / (MEDIUM_NODES - SMALL_NODES)
    pairs = zip(small.codec_s, medium.codec_s, strict=True)
    codec_s = [few_s + max(0.0, some_s - few_s) * share for few_s, some_s in pairs]
    if not _ends_with_gather(small):
        # The two differ by noise only.
        codec_s[-1] = min(small.codec_s[-1], medium.codec_s[-1])
    return tuple(codec_s)


def _measure(
    cluster: MirroredCluster, steps: Sequence[Sequence[Bucket]], times: int
) -> ExchangeCost:
    """Returns the medians of `times` steps after a warm-up."""
    # On a GPU training replays its steps, so replays are timed.
    warm_ups = STEPS_BEFORE_REPLAY if cluster.device.type == "cuda" else _WARM_UPS
    taken = [cluster.step(steps[step % len(steps)]) for step in range(warm_ups + times)]
    cluster.close()
    return _summary(taken[-times:])


def _measure_one_step(
    cluster: MirroredCluster, buckets: Sequence[Bucket], template: ExchangeCost
) -> ExchangeCost:
    """Takes one step without a warm-up, up to the last collective of each bucket of `template`."""
    taken = cluster.step(buckets, [len(bucket.calls) for bucket in template.buckets])
    cluster.close()
    return replace(_summary([taken]), samples=())


def _summary(taken: Sequence[tuple[list[BucketCost], float]]) -> ExchangeCost:
    by_bucket = zip(*(buckets for buckets, _ in taken), strict=True)
    return ExchangeCost(
        tuple(_median_cost(buckets) for buckets in by_bucket),
        fmean(sent_bytes for _, sent_bytes in taken),
        fmean(
            sum(len(call) for bucket in buckets for call in bucket.calls) for buckets, _ in taken
        ),
        tuple(tuple(buckets) for buckets, _ in taken),
    )


def _median_cost(buckets: Sequence[BucketCost]) -> BucketCost:
    """Returns the median times of several steps, and the collectives of the last."""
    columns = zip(*(bucket.codec_s for bucket in buckets), strict=True)
    return BucketCost(tuple(median(column) for column in columns), buckets[-1].calls)
