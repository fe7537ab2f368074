"""A rank among ghosts makes the calls, and counts the bytes, of one among real peers."""

from dataclasses import asdict

import pytest
import torch

from gradwire.comm.meter import Meter
from gradwire.comm.simulated import Simulated
from gradwire.engine.engine import Engine
from gradwire.engine.plan import Plan, make_plan
from gradwire.errors import ConfigError
from gradwire.perfmodel.compute import Bucket
from gradwire.perfmodel.exchange_cost import World
from gradwire.spec import compressor_classes, exchange_classes, format_spec

SPECS = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]
EXCHANGES = [
    name + (":" if example else "") + ",".join(f"{k}={v}" for k, v in example.items())
    for name, cls in exchange_classes().items()
    for example in cls.examples
]
# Odd lengths, so that shards differ; a bias, which goes dense.
SHAPES = {"weight": (48, 33), "other": (32, 64), "bias": (10,)}
TENSORS = {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def plan_of(spec: str, exchange: str, size: int) -> Plan | None:
    """The plan, if it is legal."""
    compressor = compressor_classes()[spec.partition(":")[0]]
    votes = compressor(**compressor.examples[0]).traits().is_vote
    way = f"{exchange}:aggregate=majority" if votes and exchange == "gather" else exchange
    try:
        return make_plan(spec, None, way, TENSORS.values(), size)
    except ConfigError:
        return None


def counted_by_ranks(plan: Plan, size: int) -> Meter:
    """Rank 0's meter after a step among real conversations, all about the same gradient."""
    network = Simulated(size)
    lanes = [Engine(plan, TENSORS, rank, size, seed=0) for rank in range(size)]
    network.run([lane.talk(list(SHAPES), gradients()) for lane in lanes])
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
        world, ranks = World(plan, TENSORS, size), counted_by_ranks(plan, size)
        world.step([Bucket(list(SHAPES), gradients())])
        ghost = world.ghosts[0]
        assert len(ghost.said) == ghost.meter.calls == ranks.calls
        if plan.compressor.traits().varies:
            # The longest message of all ranks counts, and one rank only knows its own.
            assert ghost.meter.sent_bytes == pytest.approx(ranks.sent_bytes, rel=0.1)
        else:
            assert asdict(ghost.meter) == asdict(ranks)
    if not met:
        pytest.skip("the plan refuses this combination")


def test_a_message_about_a_longer_shard_is_not_taken_for_ones_own() -> None:
    """The last entry of the last shard, which is one longer than the first, is the largest."""
    tensors = {"weight": torch.zeros(40, 40)}
    gradient = torch.ones(40, 40)
    gradient[-1, -1] = 9.0
    plan = make_plan("topk:ratio=0.001", None, "sharded", tensors.values(), 3)
    world = World(plan, tensors, 3)
    [talk], sent_bytes = world.step([Bucket(["weight"], [gradient.clone()])])
    network = Simulated(3)
    lanes = [Engine(plan, tensors, rank, 3, seed=0) for rank in range(3)]
    network.run([own.talk(["weight"], [gradient.clone()]) for own in lanes])
    assert [said.kind for call in talk.calls for said in call] == ["scatter", "gather"]
    assert sent_bytes == network.meters[0].sent_bytes
