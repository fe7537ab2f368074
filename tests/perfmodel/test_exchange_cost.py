"""Measurements without peers: buckets and gradients, and the exchange with mirrored peers."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import pytest
import small_model
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.base import MultiRound
from gradwire.comm.mirror import CollectiveRecord
from gradwire.comm.simulated import Simulated
from gradwire.engine.engine import Engine
from gradwire.engine.make_plan import make_plan
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.perfmodel.compute import Bucket, Compute, measure
from gradwire.perfmodel.exchange_cost import (
    MEDIUM_NODES,
    SMALL_NODES,
    _extrapolate,
    measure_exchange,
)
from gradwire.perfmodel.mirrored_cluster import MessageCost
from gradwire.perfmodel.predict import SAMPLES, step_samples, step_work

MODEL = small_model.model()
TENSORS = {name: p.detach() for name, p in MODEL.named_parameters()}


@pytest.fixture(scope="module")
def compute() -> Compute:
    return small_model.measured(small_model.model())


def test_buckets_become_full_in_order_before_the_end(compute: Compute) -> None:
    assert 0 < compute.forward_s < compute.ready_s[0]
    assert list(compute.ready_s) == sorted(compute.ready_s)
    assert compute.tail_s > 0
    assert len(compute.ready_s) == 2
    names = [name for bucket in compute.steps[0] for name in bucket.names]
    assert sorted(names) == sorted(TENSORS)


def test_gradients_are_those_of_the_model(compute: Compute) -> None:
    """Compares the last step, whose parameters two warm-ups and two steps have trained."""
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


def test_the_process_group_is_destroyed(compute: Compute) -> None:
    assert not dist.is_initialized()


def test_a_model_without_trained_parameters_is_refused() -> None:
    frozen = nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameters to train"):
        measure(frozen, small_model.loss, lambda: None)


@pytest.mark.parametrize("spec", ["none", "powersgd:rank=2", "efsign", "topk:ratio=0.01"])
def test_a_large_cluster_is_extrapolated_from_small_ones(compute: Compute, spec: str) -> None:
    """A large cluster makes the same calls, and its last decode time is extrapolated."""
    small, large = 4, 8 * MEDIUM_NODES
    plan = make_plan(spec, None, "auto", TENSORS.values(), large)
    few, many = (measure_exchange(plan, TENSORS, compute.steps, n) for n in (small, large))
    assert [len(t.calls) for t in few.messages] == [len(t.calls) for t in many.messages]
    assert few.calls == many.calls
    kinds = [[one.kind for one in call] for t in few.messages for call in t.calls]
    assert kinds == [[one.kind for one in call] for t in many.messages for call in t.calls]
    sizes = {one.size for t in many.messages for call in t.calls for one in call}
    assert sizes == {large}
    assert all(work_s >= 0 for bucket in many.messages for work_s in bucket.codec_s)


def test_bytes_of_the_sharded_exchange_stay_flat(compute: Compute) -> None:
    """A rank sends about two messages for any N; with a gather it sends N-1."""
    sent: dict[str, list[float]] = {}
    for exchange in ("sharded", "gather"):
        for size in (8, 64, 512):
            plan = make_plan("qsgd:bits=4", None, exchange, TENSORS.values(), size)
            cost = measure_exchange(plan, TENSORS, compute.steps, size)
            sent.setdefault(exchange, []).append(cost.sent_bytes)
    assert max(sent["sharded"]) < 1.4 * min(sent["sharded"])
    assert sent["gather"][-1] == pytest.approx(sent["gather"][0] * 511 / 7)


def test_dense_is_one_mean_a_bucket(compute: Compute) -> None:
    plan = make_plan("none", None, "auto", TENSORS.values(), 4)
    cost = measure_exchange(plan, TENSORS, compute.steps, 4)
    nbytes = [sum(g.nbytes for g in bucket.gradients) for bucket in compute.steps[0]]
    assert [bucket.calls for bucket in cost.messages] == [
        ((CollectiveRecord("mean", n, 4, False),),) for n in nbytes
    ]


def test_measuring_does_not_change_the_gradients(compute: Compute) -> None:
    before: list[Tensor] = [g.clone() for b in compute.steps[0] for g in b.gradients]
    plan = make_plan("efsign", None, "auto", TENSORS.values(), 2)
    measure_exchange(plan, TENSORS, compute.steps, 2)
    after = [g for b in compute.steps[0] for g in b.gradients]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


FIXED = ["none", "fp16", "efsign", "qsgd:bits=4", "topk:ratio=0.01", "powersgd:rank=1"]


def merged(buckets: Sequence[Bucket]) -> Bucket:
    return Bucket([n for b in buckets for n in b.names], [g for b in buckets for g in b.gradients])


def sent_by_all_ranks(plan: Plan, buckets: Sequence[Bucket], size: int) -> int:
    """Returns the bytes that rank 0 sends when all ranks run and encode everything."""
    network = Simulated(size)
    if isinstance(plan.compressor, MultiRound):
        # Their short messages are merged.
        buckets = [merged(buckets)]
    lanes = [Engine(plan, TENSORS, rank, size, seed=0) for rank in range(size)]
    for bucket in buckets:
        network.run([own.bucket_program(*bucket.copy()) for own in lanes])
    return network.meters[0].sent_bytes


@pytest.mark.parametrize("exchange", ["auto", "sharded"])
@pytest.mark.parametrize("spec", FIXED)
def test_bytes_of_large_clusters_are_those_of_all_ranks(
    compute: Compute, spec: str, exchange: str
) -> None:
    """Holds also if shards differ by an entry, and if only some of them are encoded."""
    for size in (3, 7, MEDIUM_NODES + 3):
        try:
            plan = make_plan(spec, None, exchange, TENSORS.values(), size)
        except ConfigError:
            pytest.skip("the plan refuses this combination")
        cost = measure_exchange(plan, TENSORS, compute.steps, size)
        assert cost.sent_bytes == sent_by_all_ranks(plan, compute.steps[0], size)


@pytest.mark.parametrize("spec", ["efsign", "topk:ratio=0.01"])
def test_a_sharded_exchange_sends_two_messages_from_2_to_1024_workers(spec: str) -> None:
    """Sends 2 (N-1)/N messages of a tensor of 1,024 shards, and a little for each shard."""
    tensors = {"weight": torch.zeros(1024, 1024)}
    steps = [[Bucket(["weight"], [torch.linspace(-1, 1, 1 << 20).view(1024, 1024)])]]
    message_bytes = make_plan(spec, None, "sharded", tensors.values(), 2).compressor.nbytes(
        (1024, 1024)
    )
    for size in (2**power for power in range(1, 11)):
        plan = make_plan(spec, None, "sharded", tensors.values(), size)
        messages = measure_exchange(plan, tensors, steps, size).sent_bytes / message_bytes
        assert messages == pytest.approx(2 * (size - 1) / size, rel=0.15)


@pytest.mark.parametrize(("spec", "buckets"), [("efsign", [0, 1]), ("powersgd:rank=1", [1])])
def test_short_messages_are_merged_as_in_training(
    compute: Compute, spec: str, buckets: list[int]
) -> None:
    """A merged message is ready when its last bucket is."""
    plan = make_plan(spec, None, "auto", TENSORS.values(), 2)
    cost = measure_exchange(plan, TENSORS, compute.steps, 2)
    assert [message.bucket for message in cost.messages] == buckets
    ready = [task.ready_s for task in step_work(compute, cost).tasks]
    assert ready == [compute.ready_s[number] for number in buckets]


def test_chunks_of_a_large_parameter_are_messages_of_its_bucket() -> None:
    """As in training, its first chunk shares a message with the bucket's other parameters."""
    tensors = {"weight": torch.randn(64, 64), "bias": torch.randn(64)}
    plan = make_plan("topk:ratio=0.1", None, "gather", tensors.values(), 2)
    steps = [[Bucket(["bias", "weight"], [tensors["bias"], tensors["weight"]])]]
    whole = measure_exchange(plan, tensors, steps, 2)
    cut = measure_exchange(plan.in_chunks(tensors, 4096), tensors, steps, 2)
    assert [len(cost.messages) for cost in (whole, cut)] == [1, 4]
    assert {message.bucket for message in cut.messages} == {0}
    first, *others = (message.calls[0][0].nbytes for message in cut.messages)
    assert first == others[0] + tensors["bias"].nbytes
    assert cut.calls == 4


def test_codec_times_are_extrapolated_linearly_in_nodes() -> None:
    gather = ((CollectiveRecord("gather", 8, 2, False),),)
    few, some = MessageCost((1.0, 3.0), gather), MessageCost((2.0, 2.9), gather)
    assert _extrapolate(few, some, 2 * MEDIUM_NODES - SMALL_NODES) == (3.0, 3.0)
    # If the answer is one message for all ranks, decoding takes the same time for any number.
    mean = ((CollectiveRecord("mean", 8, 2, False),),)
    assert _extrapolate(MessageCost((1.0, 3.0), mean), MessageCost((1.0, 4.0), mean), 1024) == (
        1.0,
        3.0,
    )


def test_steps_vary_as_they_were_measured(compute: Compute) -> None:
    """Samples combine every computed step with every measured exchange."""
    plan = make_plan("efsign", None, "gather", TENSORS.values(), 2)
    cost = measure_exchange(plan, TENSORS, compute.steps, 2)
    works = step_samples(compute, cost)
    assert len(compute.samples_s) * len(cost.samples) == len(works) == SAMPLES
    assert len({tuple(work.to_list()) for work in works}) == SAMPLES
    usual = step_work(compute, cost)
    middle = [median(column) for column in zip(*(w.to_list() for w in works), strict=True)]
    assert middle[1:] == pytest.approx(usual.to_list()[1:])
    large = measure_exchange(plan, TENSORS, compute.steps, MEDIUM_NODES + 3)
    assert not large.samples
    assert (
        step_samples(replace(compute, samples_s=()), large) == [step_work(compute, large)] * SAMPLES
    )
