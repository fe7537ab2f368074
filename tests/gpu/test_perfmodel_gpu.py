"""Rehearsals on a GPU are timed from replayed graphs, as a link's steps are."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from gradwire.engine.cuda_graphs import BEFORE_REPLAYS
from gradwire.engine.engine import Engine
from gradwire.engine.plan import make_plan
from gradwire.perfmodel.compute import Bucket
from gradwire.perfmodel.exchange_cost import SOME, Rehearsed, World, rehearse

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

# Of the odd one the last of 4 shards has a longer message, which no other rank can make up.
SHAPES = {"even": (40, 40), "odd": (29, 53)}
SPECS = [
    "efsign @ gather",
    "efsign @ sharded",
    "topk:ratio=0.011704 @ sharded",
    "qsgd:bits=4 @ hierarchical:node=2",
    "powersgd:rank=2 @ mean",
    "none @ mean",
]
MANY = {f"layer{number}": (64, 64) for number in range(40)}
"""Small tensors, which take longer to launch than to compute."""


def steps_of(shapes: Mapping[str, tuple[int, ...]], number: int) -> list[list[Bucket]]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        [
            Bucket([n], [torch.randn(s, device="cuda", generator=generator)])
            for n, s in shapes.items()
        ]
        for _ in range(number)
    ]


def world_of(spec: str, size: int) -> World:
    tensors = {name: torch.zeros(shape, device="cuda") for name, shape in SHAPES.items()}
    method, exchange = spec.split(" @ ")
    return World(make_plan(method, None, exchange, tensors.values(), size), tensors, size, 1)


def remembered(world: World, spec: str) -> list[Tensor]:
    """All of it, but what a talk that was left may have had yet to write."""
    names = ["even"] if spec.endswith("sharded") else [*SHAPES]
    lanes = [own.lanes[name] for own in world._lanes for name in names]
    return [
        tensor
        for lane in lanes
        for tensor in (*lane.memory_state.values(), *lane.aggregator_state.values())
    ]


@pytest.mark.parametrize("spec", SPECS)
def test_a_world_that_replays_does_what_one_does_that_launches(spec: str) -> None:
    """Also where a talk is left at a call that the ranks that are there cannot answer."""
    ours, plain = world_of(spec, 4), world_of(spec, 4)
    for lanes in plain._lanes:
        lanes.cuda_graphs = False
    for buckets in steps_of(SHAPES, BEFORE_REPLAYS + 3):
        talks, sent_bytes = ours.step(buckets)
        expected, expected_bytes = plain.step(buckets)
        assert [talk.calls for talk in talks] == [talk.calls for talk in expected]
        assert sent_bytes == expected_bytes
        pairs = zip(remembered(ours, spec), remembered(plain, spec), strict=True)
        assert all(torch.equal(own, other) for own, other in pairs)
    assert {own._recorder.recordings for own in ours._lanes} == {len(SHAPES)}
    assert {own._recorder.recordings for own in plain._lanes} == {0}
    ours.close()
    assert {own._recorder.recordings for own in ours._lanes} == {0}


def work_s(rehearsed: Rehearsed) -> float:
    return sum(sum(talk.works_s) for talk in rehearsed.talks)


def one_bucket(steps: list[list[Bucket]]) -> list[list[Bucket]]:
    """All gradients of a step in one bucket."""
    return [
        [Bucket([n for b in step for n in b.names], [g for b in step for g in b.gradients])]
        for step in steps
    ]


@pytest.mark.parametrize("spec", ["efsign", "topk:ratio=0.01", "powersgd:rank=1"])
def test_what_is_timed_are_replays(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.zeros(shape, device="cuda") for name, shape in MANY.items()}
    plan = make_plan(spec, None, "auto", tensors.values(), 4)
    steps = one_bucket(steps_of(MANY, 3))
    replayed = rehearse(plan, tensors, steps, 4)
    monkeypatch.setattr(Engine, "_recording", lambda *_: None)
    launched = rehearse(plan, tensors, steps, 4)
    assert [talk.calls for talk in replayed.talks] == [talk.calls for talk in launched.talks]
    assert 0 < work_s(replayed) < work_s(launched) / 2


def test_work_in_a_large_world_goes_on_from_replays() -> None:
    """Of 64 ranks a step that is launched would take many times as long."""
    tensors = {name: torch.zeros(shape, device="cuda") for name, shape in MANY.items()}
    plan = make_plan("efsign", None, "sharded", tensors.values(), 4 * SOME)
    steps = one_bucket(steps_of(MANY, 3))
    some, many = (rehearse(plan, tensors, steps, size) for size in (SOME, 4 * SOME))
    assert [len(talk.calls) for talk in some.talks] == [len(talk.calls) for talk in many.talks]
    assert 0 < work_s(some) < work_s(many) < 8 * work_s(some)
