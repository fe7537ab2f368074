"""Worlds on a GPU replay their steps; here with graphs that only count, since there need be none.

What such a graph contains is done when it is recorded, and nothing is done when it is replayed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from gradwire.engine import cuda_graphs
from gradwire.engine.cuda_graphs import BEFORE_REPLAYS, CapturedProgram, is_steady
from gradwire.engine.engine import Engine, Led
from gradwire.engine.plan import make_plan
from gradwire.perfmodel import exchange_cost
from gradwire.perfmodel.compute import Bucket
from gradwire.perfmodel.exchange_cost import World, rehearse

# Of the odd one the last of 4 shards has 385 entries and not 384, and a longer message about them,
# which the rank that is there cannot make up.
SHAPES = {"even": (40, 40), "odd": (29, 53)}
SPECS = [
    "efsign @ sharded",
    "efsign @ gather",
    "topk:ratio=0.011704 @ sharded",
    "powersgd:rank=2 @ mean",
]


class CountedGraph:
    """In place of torch.cuda.CUDAGraph."""

    made: ClassVar[list["CountedGraph"]] = []

    def __init__(self) -> None:
        self.replays = 0
        self.made.append(self)

    def replay(self) -> None:
        self.replays += 1


@contextmanager
def no_capture(graph: CountedGraph, pool: None, device: torch.device) -> Iterator[None]:
    yield


def always(
    self: Engine, names: Sequence[str], grads: Sequence[Tensor], led: Callable[[], Led]
) -> CapturedProgram | None:
    assert all(is_steady(self.lanes[name]) for name in names)
    return self._recorder.find(self.lanes, names, grads, led)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[CountedGraph]:
    """All that are made in a test."""
    monkeypatch.setattr(CountedGraph, "made", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CountedGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graphs, "capture", no_capture)
    monkeypatch.setattr(Engine, "_recording", always)
    return CountedGraph.made


def world_of(spec: str, name: str) -> World:
    tensors = {name: torch.zeros(SHAPES[name])}
    method, exchange = spec.split(" @ ")
    world = World(make_plan(method, None, exchange, tensors.values(), 4), tensors, 4, first_step=1)
    world._lies_still = True
    return world


def bucket(name: str, step: int) -> Bucket:
    generator = torch.Generator().manual_seed(step)
    return Bucket([name], [torch.randn(SHAPES[name], generator=generator)])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_step_is_replayed_as_far_as_it_was_taken(
    spec: str, name: str, graphs: list[CountedGraph]
) -> None:
    world = world_of(spec, name)
    [lanes] = world._lanes
    taken = [world.step([bucket(name, step)]) for step in range(BEFORE_REPLAYS)]
    cuda_graphs = len(graphs)
    assert [graph.replays for graph in graphs] == [1] * cuda_graphs
    taken += [world.step([bucket(name, step)]) for step in range(3)]
    # All the work was in graphs: no more are made, and each is replayed once a step.
    assert [graph.replays for graph in graphs] == [4] * cuda_graphs
    [[first], _], *_ = taken
    whole = spec.endswith(("gather", "mean")) or name == "even"
    assert cuda_graphs == len(first.calls) + whole
    assert {(talk.calls, sent_bytes) for [talk], sent_bytes in taken} == {
        (first.calls, taken[0][1])
    }
    # Kept like any other step, and ready to be taken without a recording.
    assert lanes.lanes[name].ctx.step == 1 + len(taken)
    assert lanes.lanes[name].ctx.key_store is None
    assert (
        lanes.lanes[name].memory_state.keys()
        == lanes.lanes[name].memory.state(1, world.device).keys()
    )
    world.close()
    assert lanes._recorder.recordings == 0


def test_copies_lie_in_the_same_place_only_where_they_are_to_be_replayed() -> None:
    world, given = world_of("efsign @ gather", "even"), bucket("even", 0)
    first, second = (world._copy(0, 0, bucket("even", step)) for step in (1, 0))
    assert first.gradients[0].data_ptr() == second.gradients[0].data_ptr()
    assert torch.equal(second.gradients[0], given.gradients[0])
    assert world._copy(0, 1, given).gradients[0].data_ptr() != first.gradients[0].data_ptr()
    world._lies_still = False
    assert world._copy(0, 0, given).gradients[0].data_ptr() != first.gradients[0].data_ptr()


def test_no_step_that_measures_its_error_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    step = World.step

    def noted(self: World, *given: object) -> object:
        seen.extend(lane.ctx.step for lanes in self._lanes for lane in lanes.lanes.values())
        return step(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(World, "step", noted)
    tensors = {"even": torch.zeros(SHAPES["even"])}
    plan = make_plan("efsign", None, "gather", tensors.values(), 2)
    rehearse(plan, tensors, [[bucket("even", 0)]], 2)
    assert seen == [*range(1, 1 + exchange_cost._WARM_UPS + exchange_cost._REPEATS)]
    assert 1 + BEFORE_REPLAYS + exchange_cost._REPEATS < 100
