"""Exchange cost: encode and decode time and collectives of one rank, measured with mirrored peers.

Costs of large clusters are extrapolated from small ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from torch import Tensor

from gradwire.engine.cuda_graphs import STEPS_BEFORE_REPLAY
from gradwire.engine.plan import Plan
from gradwire.perfmodel.compute import Bucket
from gradwire.perfmodel.mirrored_cluster import MessageCost, MirroredCluster
from gradwire.perfmodel.sampling import SamplingClock, sample_shards
from gradwire.perfmodel.timers import clock_of

SMALL_NODES, MEDIUM_NODES = 2, 16
"""Nodes of clusters small enough to decode all answers; larger ones are extrapolated linearly."""
_REPEATS, _FEW_REPEATS = 4, 2
"""Timed steps: of a cluster itself, and of small clusters that a large one is extrapolated from."""
_FIRST_STEP = 1
"""Step 0, and one step in many after it, also measures its error; the timed steps avoid those."""
_WARM_UPS = 2


@dataclass(frozen=True)
class ExchangeCost:
    """The cost of a step's exchange by message, and the bytes and collectives of one rank in it."""

    messages: tuple[MessageCost, ...]
    sent_bytes: float
    calls: float
    samples: tuple[tuple[MessageCost, ...], ...] = ()
    """The costs of every timed step; empty if they were extrapolated."""
    pipelined: bool = True
    """Whether a message is encoded while others are on the wire."""


def measure_exchange(
    plan: Plan, tensors: Mapping[str, Tensor], steps: Sequence[Sequence[Bucket]], size: int
) -> ExchangeCost:
    """Measures the exchange of some steps' gradients by one rank of `size`, after a warm-up.

    Short messages are merged and large parameters cut into chunks as `attach` does by default.
    """
    node = plan.node or 1
    if size > MEDIUM_NODES * node:
        return _measure_large(plan, tensors, steps, size)
    return _measure(MirroredCluster(plan, tensors, size, _FIRST_STEP), steps, _REPEATS)


def _measure_large(
    plan: Plan, tensors: Mapping[str, Tensor], steps: Sequence[Sequence[Bucket]], size: int
) -> ExchangeCost:
    """Measures the exchange in a large cluster, where a full step would take too long.

    Of many equal shards a few are encoded. Messages end with their last collective, and the time to
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
            large, messages=tuple(map(_with_codec_times_of, large.messages, small.messages))
        )
    codec_grows = device.type == "cuda" and not _encodes_once(plan)
    if not codec_grows and not any(_ends_with_gather(message) for message in small.messages):
        # The answer is one message for any number of ranks.
        return _with_last_codec_s(large, [message.codec_s[-1] for message in small.messages])
    medium = _measure(
        MirroredCluster(plan, tensors, MEDIUM_NODES * node, _FIRST_STEP), steps, _FEW_REPEATS
    )
    sizes = zip(small.messages, medium.messages, strict=True)
    extrapolated = [_extrapolate(*pair, size / node) for pair in sizes]
    if codec_grows:
        pairs = zip(extrapolated, large.messages, strict=True)
        messages = tuple(message._replace(codec_s=line) for line, message in pairs)
        return replace(large, messages=messages)
    return _with_last_codec_s(large, [line[-1] for line in extrapolated])


def _encodes_once(plan: Plan) -> bool:
    """Returns True if a rank's work before its last answer does not depend on the cluster size."""
    exchanges = {method.exchange.across_nodes.name for method in plan.methods}
    return exchanges <= {"mean", "gather"}


def _with_codec_times_of(large: MessageCost, small: MessageCost) -> MessageCost:
    """Returns the collectives of `large` with the encode and decode times of `small`."""
    return large._replace(codec_s=small.codec_s)


def _with_last_codec_s(cost: ExchangeCost, last_codec_s: Sequence[float]) -> ExchangeCost:
    """Replaces the last decode time of every message."""
    pairs = zip(cost.messages, last_codec_s, strict=True)
    messages = tuple(
        message._replace(codec_s=(*message.codec_s[:-1], last_s)) for message, last_s in pairs
    )
    return replace(cost, messages=messages)


def _ends_with_gather(message: MessageCost) -> bool:
    """Returns True if the last answer holds the messages of all ranks."""
    return bool(message.calls) and message.calls[-1][-1].kind == "gather"


def _extrapolate(small: MessageCost, medium: MessageCost, nodes: float) -> tuple[float, ...]:
    """Returns encode and decode times of a message for `nodes` nodes, extrapolated linearly."""
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
    return _summary(taken[-times:], cluster.is_pipelined)


def _measure_one_step(
    cluster: MirroredCluster, buckets: Sequence[Bucket], template: ExchangeCost
) -> ExchangeCost:
    """Takes one step without a warm-up, up to the last collective of each message of `template`."""
    taken = cluster.step(buckets, [len(message.calls) for message in template.messages])
    cluster.close()
    return replace(_summary([taken], cluster.is_pipelined), samples=())


def _summary(taken: Sequence[tuple[list[MessageCost], float]], is_pipelined: bool) -> ExchangeCost:
    by_message = zip(*(messages for messages, _ in taken), strict=True)
    return ExchangeCost(
        tuple(_median_cost(messages) for messages in by_message),
        fmean(sent_bytes for _, sent_bytes in taken),
        fmean(sum(len(call) for m in messages for call in m.calls) for messages, _ in taken),
        tuple(tuple(messages) for messages, _ in taken),
        is_pipelined,
    )


def _median_cost(messages: Sequence[MessageCost]) -> MessageCost:
    """Returns the median times of several steps, and the collectives of the last."""
    columns = zip(*(message.codec_s for message in messages), strict=True)
    return messages[-1]._replace(codec_s=tuple(median(column) for column in columns))
