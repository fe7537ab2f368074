"""What is measured without peers: buckets and gradients, and the exchange among ghosts."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import pytest
import small_model
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.comm.mirror import Said
from gradwire.comm.simulated import Simulated
from gradwire.engine.engine import Engine
from gradwire.engine.plan import Plan, make_plan
from gradwire.errors import ConfigError
from gradwire.perfmodel.compute import Bucket, Compute, measure
from gradwire.perfmodel.exchange_cost import FEW, SOME, Talk, _on_a_line, rehearse
from gradwire.perfmodel.predict import SAMPLES, step_samples, step_work

MODEL = small_model.model()
TENSORS = {name: p.detach() for name, p in MODEL.named_parameters()}


@pytest.fixture(scope="module")
def compute() -> Compute:
    return small_model.measured(small_model.model())


def test_buckets_are_full_in_turn_before_the_end(compute: Compute) -> None:
    assert 0 < compute.forward_s < compute.ready_s[0]
    assert list(compute.ready_s) == sorted(compute.ready_s)
    assert compute.rest_s > 0
    assert len(compute.ready_s) == 2
    names = [name for bucket in compute.steps[0] for name in bucket.names]
    assert sorted(names) == sorted(TENSORS)


def test_gradients_are_those_of_the_model(compute: Compute) -> None:
    """The last step's, from the parameters that two warm-ups and two steps have left."""
    net = small_model.model()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(5):
        optimiser.zero_grad()
        small_model.loss(net, step).backward()
        if step < 4:
            optimiser.step()
    found = {n: g for b in compute.steps[-1] for n, g in zip(*b, strict=True)}
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_no_group_is_left_behind(compute: Compute) -> None:
    assert not dist.is_initialized()


def test_a_model_must_learn_something() -> None:
    frozen = nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameters to train"):
        measure(frozen, small_model.loss, lambda: None)


@pytest.mark.parametrize("spec", ["none", "powersgd:rank=2", "efsign", "topk:ratio=0.01"])
def test_a_large_world_goes_on_from_small_ones(compute: Compute, spec: str) -> None:
    """The same calls with longer ways; and a large world's last work is not decoded but known."""
    small, large = 4, 8 * SOME
    plan = make_plan(spec, None, "auto", TENSORS.values(), large)
    few, many = (rehearse(plan, TENSORS, compute.steps, n) for n in (small, large))
    assert [len(t.calls) for t in few.talks] == [len(t.calls) for t in many.talks]
    assert few.calls == many.calls
    kinds = [[said.kind for said in call] for t in few.talks for call in t.calls]
    assert kinds == [[said.kind for said in call] for t in many.talks for call in t.calls]
    sizes = {said.size for t in many.talks for call in t.calls for said in call}
    assert sizes == {large}
    assert all(work_s >= 0 for talk in many.talks for work_s in talk.works_s)


def test_bytes_of_the_sharded_exchange_stay_flat(compute: Compute) -> None:
    """About two messages a rank, whatever N; a gather takes N-1."""
    sent: dict[str, list[float]] = {}
    for way in ("sharded", "gather"):
        for size in (8, 64, 512):
            plan = make_plan("qsgd:bits=4", None, way, TENSORS.values(), size)
            sent.setdefault(way, []).append(rehearse(plan, TENSORS, compute.steps, size).sent_bytes)
    assert max(sent["sharded"]) < 1.4 * min(sent["sharded"])
    assert sent["gather"][-1] == pytest.approx(sent["gather"][0] * 511 / 7)


def test_dense_is_one_mean_a_bucket(compute: Compute) -> None:
    plan = make_plan("none", None, "auto", TENSORS.values(), 4)
    rehearsed = rehearse(plan, TENSORS, compute.steps, 4)
    told = [sum(g.nbytes for g in bucket.gradients) for bucket in compute.steps[0]]
    assert [talk.calls for talk in rehearsed.talks] == [
        ((Said("mean", n, 4, False),),) for n in told
    ]


def test_what_was_rehearsed_with_is_not_changed(compute: Compute) -> None:
    before: list[Tensor] = [g.clone() for b in compute.steps[0] for g in b.gradients]
    plan = make_plan("efsign", None, "auto", TENSORS.values(), 2)
    rehearse(plan, TENSORS, compute.steps, 2)
    after = [g for b in compute.steps[0] for g in b.gradients]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


FIXED = ["none", "fp16", "efsign", "qsgd:bits=4", "topk:ratio=0.01", "powersgd:rank=1"]


def said_by_all(plan: Plan, buckets: Sequence[Bucket], size: int) -> int:
    """What rank 0 sends when all ranks are there and nobody is spared anything."""
    network = Simulated(size)
    lanes = [Engine(plan, TENSORS, rank, size, seed=0) for rank in range(size)]
    for bucket in buckets:
        network.run([own.talk(*bucket.copy()) for own in lanes])
    return network.meters[0].sent_bytes


@pytest.mark.parametrize("exchange", ["auto", "sharded"])
@pytest.mark.parametrize("spec", FIXED)
def test_bytes_of_large_worlds_are_those_of_all_ranks(
    compute: Compute, spec: str, exchange: str
) -> None:
    """Also where shards differ by an entry, and where only some of them are encoded."""
    for size in (3, 7, SOME + 3):
        try:
            plan = make_plan(spec, None, exchange, TENSORS.values(), size)
        except ConfigError:
            pytest.skip("the plan refuses this combination")
        rehearsed = rehearse(plan, TENSORS, compute.steps, size)
        assert rehearsed.sent_bytes == said_by_all(plan, compute.steps[0], size)


@pytest.mark.parametrize("spec", ["efsign", "topk:ratio=0.01"])
def test_a_sharded_exchange_sends_two_messages_from_2_to_1024_workers(spec: str) -> None:
    """Of a tensor with room for 1,024 shards: 2 (N-1)/N messages, and a little for each shard."""
    tensors = {"weight": torch.zeros(1024, 1024)}
    steps = [[Bucket(["weight"], [torch.linspace(-1, 1, 1 << 20).view(1024, 1024)])]]
    said = make_plan(spec, None, "sharded", tensors.values(), 2).compressor.nbytes((1024, 1024))
    for size in (2**power for power in range(1, 11)):
        plan = make_plan(spec, None, "sharded", tensors.values(), size)
        messages = rehearse(plan, tensors, steps, size).sent_bytes / said
        assert messages == pytest.approx(2 * (size - 1) / size, rel=0.15)


def test_works_go_on_in_a_straight_line_with_nodes() -> None:
    gather = ((Said("gather", 8, 2, False),),)
    few, some = Talk((1.0, 3.0), gather), Talk((2.0, 2.9), gather)
    assert _on_a_line(few, some, 2 * SOME - FEW) == (3.0, 3.0)
    # Where everybody's answer is one, it takes the same among any number.
    mean = ((Said("mean", 8, 2, False),),)
    assert _on_a_line(Talk((1.0, 3.0), mean), Talk((1.0, 4.0), mean), 1024) == (1.0, 3.0)


def test_steps_vary_as_they_were_measured(compute: Compute) -> None:
    """The medians are usual; in samples every computed step meets every rehearsed one."""
    plan = make_plan("efsign", None, "gather", TENSORS.values(), 2)
    rehearsed = rehearse(plan, TENSORS, compute.steps, 2)
    works = step_samples(compute, rehearsed)
    assert len(compute.samples_s) * len(rehearsed.samples) == len(works) == SAMPLES
    assert len({tuple(work.numbers()) for work in works}) == SAMPLES
    usual = step_work(compute, rehearsed)
    middle = [median(column) for column in zip(*(w.numbers() for w in works), strict=True)]
    assert middle[1:] == pytest.approx(usual.numbers()[1:])
    large = rehearse(plan, TENSORS, compute.steps, SOME + 3)
    assert not large.samples
    assert (
        step_samples(replace(compute, samples_s=()), large) == [step_work(compute, large)] * SAMPLES
    )
