"""One rank's exchange among any number of ranks that are not there: its work and its calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from torch import Tensor

from laconic.forecast.clock import clock_of
from laconic.forecast.compute import Bucket
from laconic.forecast.sampling import SamplingClock, sampled
from laconic.forecast.world import Talk, World
from laconic.plan import Plan
from laconic.recorded import BEFORE_REPLAYS
from laconic.spec import find_layers, read_settings

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


def rehearse(
    plan: Plan, tensors: Mapping[str, Tensor], steps: Sequence[Sequence[Bucket]], size: int
) -> Rehearsed:
    """One rank of `size` exchanges the gradients of some steps, after a warm-up.

    In a large world one step takes as long as it would there. So of many equal shards a few are
    encoded; and the talks end with their last call, and the time to decode everybody's answers is
    extrapolated from two small worlds. On a GPU, where no step of a large world is replayed, so is
    all work that grows with it. Calls and bytes are those of all.
    """
    node = plan.node() or 1
    if size <= SOME * node:
        return _rehearse(World(plan, tensors, size, _FIRST), steps, _REPEATS)
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
    return _summary([taken])


def _summary(taken: Sequence[tuple[list[Talk], float]]) -> Rehearsed:
    by_bucket = zip(*(talks for talks, _ in taken), strict=True)
    return Rehearsed(
        tuple(_middle(talks) for talks in by_bucket),
        fmean(sent_bytes for _, sent_bytes in taken),
        fmean(sum(len(call) for talk in talks for call in talk.calls) for talks, _ in taken),
    )


def _middle(talks: Sequence[Talk]) -> Talk:
    """The median work of several steps, and the calls of the last."""
    columns = zip(*(talk.works_s for talk in talks), strict=True)
    return Talk(tuple(median(column) for column in columns), talks[-1].calls)
