"""A rank with mirrored peers makes the calls, and counts the bytes, of one with real peers."""

from dataclasses import asdict

import pytest
import torch

from gradwire.comm.meter import Meter
from gradwire.comm.simulated import Simulated
from gradwire.engine.engine import Engine
from gradwire.engine.make_plan import make_plan
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.perfmodel.compute import Bucket
from gradwire.perfmodel.mirrored_cluster import MirroredCluster
from gradwire.spec import compressor_classes, exchange_classes, format_spec

SPECS = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]
EXCHANGES = [
    name + (":" if example else "") + ",".join(f"{k}={v}" for k, v in example.items())
    for name, cls in exchange_classes().items()
    for example in cls.examples
]
# Odd lengths, so that shards differ; a bias, which is sent dense.
SHAPES = {"weight": (48, 33), "other": (32, 64), "bias": (10,)}
TENSORS = {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def plan_of(spec: str, exchange: str, size: int) -> Plan | None:
    """Returns the plan, or None if it is refused."""
    compressor = compressor_classes()[spec.partition(":")[0]]
    votes = compressor(**compressor.examples[0]).traits().is_vote
    spelled = f"{exchange}:aggregate=majority" if votes and exchange == "gather" else exchange
    try:
        return make_plan(spec, None, spelled, TENSORS.values(), size)
    except ConfigError:
        return None


def counted_by_ranks(plan: Plan, size: int) -> Meter:
    """Returns rank 0's meter after a step of real ranks with equal gradients."""
    network = Simulated(size)
    lanes = [Engine(plan, TENSORS, rank, size, seed=0) for rank in range(size)]
    network.run([lane.bucket_program(list(SHAPES), gradients()) for lane in lanes])
    return network.meters[0]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("spec", SPECS)
def test_calls_and_bytes_are_those_of_real_ranks(spec: str, exchange: str) -> None:
    met = 0
    for size in (2, 6):
        plan = plan_of(spec, exchange, size)
        if plan is None:
            continue
        met += 1
        cluster, ranks = MirroredCluster(plan, TENSORS, size), counted_by_ranks(plan, size)
        cluster.step([Bucket(list(SHAPES), gradients())])
        mirror = cluster.mirrors[0]
        assert len(mirror.records) == mirror.meter.calls == ranks.calls
        if plan.compressor.traits().variable_length:
            # The longest message of all ranks counts, and one rank knows only its own.
            assert mirror.meter.sent_bytes == pytest.approx(ranks.sent_bytes, rel=0.1)
        else:
            assert asdict(mirror.meter) == asdict(ranks)
    if not met:
        pytest.skip("the plan refuses this combination")


def test_a_message_of_a_longer_shard_is_not_decoded() -> None:
    """Uses a last shard that is one entry longer than the first, with the largest entry last."""
    tensors = {"weight": torch.zeros(40, 40)}
    gradient = torch.ones(40, 40)
    gradient[-1, -1] = 9.0
    plan = make_plan("topk:ratio=0.001", None, "sharded", tensors.values(), 3)
    cluster = MirroredCluster(plan, tensors, 3)
    [cost], sent_bytes = cluster.step([Bucket(["weight"], [gradient.clone()])])
    network = Simulated(3)
    lanes = [Engine(plan, tensors, rank, 3, seed=0) for rank in range(3)]
    network.run([own.bucket_program(["weight"], [gradient.clone()]) for own in lanes])
    assert [one.kind for call in cost.calls for one in call] == ["all_to_all", "gather"]
    assert sent_bytes == network.meters[0].sent_bytes
