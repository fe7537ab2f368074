"""Measured exchanges on a GPU are timed from replayed CUDA graphs, like a link's steps."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from gradwire.engine.cuda_graphs import STEPS_BEFORE_REPLAY
from gradwire.engine.engine import Engine
from gradwire.engine.make_plan import make_plan
from gradwire.perfmodel.compute import Bucket
from gradwire.perfmodel.exchange_cost import MEDIUM_NODES, ExchangeCost, measure_exchange
from gradwire.perfmodel.mirrored_cluster import MirroredCluster

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

# The last of 4 shards of the odd tensor has a longer message, which no other rank can mirror.
SHAPES = {"even": (40, 40), "odd": (29, 53)}
SPECS = [
    "efsign @ gather",
    "efsign @ sharded",
    "topk:ratio=0.011704 @ sharded",
    "qsgd:bits=4 @ hierarchical:node=2",
    "powersgd:rank=2 @ mean",
    "none @ mean",
]
LAYERS = {f"layer{number}": (64, 64) for number in range(40)}
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


def cluster_of(spec: str, size: int) -> MirroredCluster:
    tensors = {name: torch.zeros(shape, device="cuda") for name, shape in SHAPES.items()}
    method, exchange = spec.split(" @ ")
    return MirroredCluster(
        make_plan(method, None, exchange, tensors.values(), size), tensors, size, 1
    )


def state_tensors(cluster: MirroredCluster, spec: str) -> list[Tensor]:
    """Returns the state of all lanes that an unfinished exchange has certainly written."""
    names = ["even"] if spec.endswith("sharded") else [*SHAPES]
    lanes = [engine.lanes[name] for engine in cluster._engines for name in names]
    return [
        tensor
        for lane in lanes
        for tensor in (*lane.memory_state.values(), *lane.aggregator_state.values())
    ]


@pytest.mark.parametrize("spec", SPECS)
def test_replayed_and_launched_exchanges_are_equal(spec: str) -> None:
    """Covers exchanges that end early, at a collective that the mirrored ranks cannot answer."""
    ours, plain = cluster_of(spec, 4), cluster_of(spec, 4)
    for engine in plain._engines:
        engine.cuda_graphs = False
    for buckets in steps_of(SHAPES, STEPS_BEFORE_REPLAY + 3):
        costs, sent_bytes = ours.step(buckets)
        expected, expected_bytes = plain.step(buckets)
        assert [cost.calls for cost in costs] == [cost.calls for cost in expected]
        assert sent_bytes == expected_bytes
        pairs = zip(state_tensors(ours, spec), state_tensors(plain, spec), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert {len(engine._graphs) for engine in ours._engines} == {len(SHAPES)}
    assert {len(engine._graphs) for engine in plain._engines} == {0}
    ours.close()
    assert {len(engine._graphs) for engine in ours._engines} == {0}


def work_s(exchange: ExchangeCost) -> float:
    return sum(sum(cost.codec_s) for cost in exchange.messages)


def one_bucket(steps: list[list[Bucket]]) -> list[list[Bucket]]:
    """Merges all gradients of a step into one bucket."""
    return [
        [Bucket([n for b in step for n in b.names], [g for b in step for g in b.gradients])]
        for step in steps
    ]


@pytest.mark.parametrize("spec", ["efsign", "topk:ratio=0.01", "powersgd:rank=1"])
def test_replays_are_timed(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.zeros(shape, device="cuda") for name, shape in LAYERS.items()}
    plan = make_plan(spec, None, "auto", tensors.values(), 4)
    steps = one_bucket(steps_of(LAYERS, 3))
    replayed = measure_exchange(plan, tensors, steps, 4)
    monkeypatch.setattr(Engine, "_is_capturable", lambda *_: False)
    launched = measure_exchange(plan, tensors, steps, 4)
    assert [cost.calls for cost in replayed.messages] == [cost.calls for cost in launched.messages]
    assert 0 < work_s(replayed) < work_s(launched) / 2


def test_cost_of_a_large_world_is_extrapolated_from_replays() -> None:
    """Launching a step of 64 ranks would take many times as long."""
    tensors = {name: torch.zeros(shape, device="cuda") for name, shape in LAYERS.items()}
    plan = make_plan("efsign", None, "sharded", tensors.values(), 4 * MEDIUM_NODES)
    steps = one_bucket(steps_of(LAYERS, 3))
    some, many = (
        measure_exchange(plan, tensors, steps, size) for size in (MEDIUM_NODES, 4 * MEDIUM_NODES)
    )
    assert [len(cost.calls) for cost in some.messages] == [
        len(cost.calls) for cost in many.messages
    ]
    assert 0 < work_s(some) < work_s(many) < 8 * work_s(some)
