"""Clusters on a GPU replay their steps; tested with graphs that only count, without a GPU.

The work of such a graph is done when it is captured, and nothing is done when it is replayed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from gradwire.comm.base import CollectiveProgram
from gradwire.engine import cuda_graphs
from gradwire.engine.cuda_graphs import STEPS_BEFORE_REPLAY, is_graph_safe
from gradwire.engine.engine import Engine
from gradwire.engine.make_plan import make_plan
from gradwire.engine.step import BucketResult
from gradwire.perfmodel import exchange_cost
from gradwire.perfmodel.compute import Bucket
from gradwire.perfmodel.exchange_cost import measure_exchange
from gradwire.perfmodel.mirrored_cluster import MirroredCluster

# In the odd tensor the last of 4 shards has 385 entries and not 384, and a longer message, which
# the running rank cannot mirror.
SHAPES = {"even": (40, 40), "odd": (29, 53)}
SPECS = [
    "efsign @ sharded",
    "efsign @ gather",
    "topk:ratio=0.011704 @ sharded",
    "powersgd:rank=2 @ mean",
]


class CountedGraph:
    """Replaces torch.cuda.CUDAGraph."""

    made: ClassVar[list["CountedGraph"]] = []

    def __init__(self) -> None:
        self.replays = 0
        self.made.append(self)

    def replay(self) -> None:
        self.replays += 1


@contextmanager
def no_capture(graph: CountedGraph, pool: None, device: torch.device) -> Iterator[None]:
    yield


observed = Engine._observed


def captured(
    self: Engine,
    names: Sequence[str],
    grads: Sequence[Tensor],
    start: Callable[[], CollectiveProgram[BucketResult]],
) -> CollectiveProgram[None]:
    """Captures the bucket as the engine does for CUDA tensors."""
    assert all(is_graph_safe(self.lanes[name]) for name in names)
    graph = self._graphs.find(self.lanes, names, grads, start)
    return observed(self, names, grads, start if graph is None else graph.run)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[CountedGraph]:
    """Returns all graphs that are made in a test."""
    monkeypatch.setattr(CountedGraph, "made", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CountedGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graphs, "capture", no_capture)
    monkeypatch.setattr(Engine, "_observed", captured)
    return CountedGraph.made


def cluster_of(spec: str, name: str) -> MirroredCluster:
    tensors = {name: torch.zeros(SHAPES[name])}
    method, exchange = spec.split(" @ ")
    cluster = MirroredCluster(
        make_plan(method, None, exchange, tensors.values(), 4), tensors, 4, first_step=1
    )
    cluster._in_place = True
    return cluster


def bucket(name: str, step: int) -> Bucket:
    generator = torch.Generator().manual_seed(step)
    return Bucket([name], [torch.randn(SHAPES[name], generator=generator)])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_step_is_replayed_as_far_as_it_was_captured(
    spec: str, name: str, graphs: list[CountedGraph]
) -> None:
    cluster = cluster_of(spec, name)
    [engine] = cluster._engines
    taken = [cluster.step([bucket(name, step)]) for step in range(STEPS_BEFORE_REPLAY)]
    cuda_graphs = len(graphs)
    assert [graph.replays for graph in graphs] == [1] * cuda_graphs
    taken += [cluster.step([bucket(name, step)]) for step in range(3)]
    # All work is in graphs: no more are made, and each is replayed once per step.
    assert [graph.replays for graph in graphs] == [4] * cuda_graphs
    [[first], _], *_ = taken
    whole = spec.endswith(("gather", "mean")) or name == "even"
    assert cuda_graphs == len(first.calls) + whole
    assert {(cost.calls, sent_bytes) for [cost], sent_bytes in taken} == {
        (first.calls, taken[0][1])
    }
    # Committed like any other step, and the next can run without a graph.
    lane = engine.lanes[name]
    assert lane.ctx.step == 1 + len(taken)
    assert lane.ctx.key_store is None
    assert lane.memory_state.keys() == lane.memory.state(1, cluster.device).keys()
    cluster.close()
    assert len(engine._graphs) == 0


def test_copies_keep_their_address_only_for_replays() -> None:
    cluster, given = cluster_of("efsign @ gather", "even"), bucket("even", 0)
    first, second = (cluster._copy(0, 0, bucket("even", step)) for step in (1, 0))
    assert first.gradients[0].data_ptr() == second.gradients[0].data_ptr()
    assert torch.equal(second.gradients[0], given.gradients[0])
    assert cluster._copy(0, 1, given).gradients[0].data_ptr() != first.gradients[0].data_ptr()
    cluster._in_place = False
    assert cluster._copy(0, 0, given).gradients[0].data_ptr() != first.gradients[0].data_ptr()


def test_no_timed_step_measures_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    step = MirroredCluster.step

    def noted(self: MirroredCluster, *given: object) -> object:
        seen.extend(lane.ctx.step for engine in self._engines for lane in engine.lanes.values())
        return step(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(MirroredCluster, "step", noted)
    tensors = {"even": torch.zeros(SHAPES["even"])}
    plan = make_plan("efsign", None, "gather", tensors.values(), 2)
    measure_exchange(plan, tensors, [[bucket("even", 0)]], 2)
    assert seen == [*range(1, 1 + exchange_cost._WARM_UPS + exchange_cost._REPEATS)]
    assert 1 + STEPS_BEFORE_REPLAY + exchange_cost._REPEATS < 100
