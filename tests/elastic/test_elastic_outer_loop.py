"""DiLoCo and SparseLoCo inside a Manager: joins, syncs that fail, and refusals."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fake_torchft import Cluster, FakeManager
from torch import Tensor, nn

from gradwire import ConfigError, NonFiniteError
from gradwire.elastic import DiLoCo, SparseLoCo
from gradwire.elastic.outer_loop import ElasticOuterLoop

SHAPE = (30, 40)


class Replica:
    """A matrix that is pulled to a target of its own, with a momentum inside."""

    def __init__(
        self, cluster: Cluster, seed: int, make: Callable[..., Any], **options: Any
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.manager = FakeManager(cluster, use_async_quorum=False)
        self.model = nn.Module()
        self.model.w = nn.Parameter(torch.randn(SHAPE, generator=generator))
        self.model.register_buffer("seen", torch.full((1,), float(seed)))
        self.target = torch.randn(SHAPE, generator=generator)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.method: ElasticOuterLoop = make(self.manager, self.model, self.optimizer, **options)

    @property
    def w(self) -> Tensor:
        return self.model.w.detach()

    @property
    def anchor(self) -> Tensor:
        return self.method._fragment_of_all.anchor["w"].view(SHAPE)

    @property
    def residual(self) -> Tensor:
        (lane,) = self.method._fragment_of_all.engine.lanes.values()
        return lane.memory_state["residual"].clone()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model.w.grad = self.w - self.target
            self.optimizer.step()


def enter(cluster: Cluster, replicas: Sequence[Replica]) -> None:
    cluster.run([r.manager for r in replicas], lambda i: replicas[i].method.__enter__())


def train(cluster: Cluster, replicas: Sequence[Replica], steps: int) -> list[object]:
    return cluster.run([r.manager for r in replicas], lambda i: replicas[i].train(steps))


def assert_equal(replicas: Sequence[Replica]) -> None:
    for other in replicas[1:]:
        assert torch.equal(other.w, replicas[0].w)
        assert torch.equal(other.anchor, replicas[0].anchor)


def test_all_begin_with_the_first_and_average_their_steps() -> None:
    """With one step, rate 1 and no momentum outside it is SGD on the mean gradient."""
    cluster = Cluster()
    options = {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    replicas = [Replica(cluster, seed, DiLoCo, **options) for seed in range(3)]
    start = replicas[0].w.clone()
    enter(cluster, replicas)
    assert_equal(replicas)
    assert torch.equal(replicas[1].w, start)
    assert train(cluster, replicas, 1) == [None] * 3
    mean = sum((start - r.target for r in replicas), torch.zeros(SHAPE)) / 3
    torch.testing.assert_close(replicas[0].w, start - 0.1 * mean)
    assert_equal(replicas)


@pytest.mark.parametrize("make", [DiLoCo, SparseLoCo])
def test_a_newcomer_waits_for_a_sync_and_is_not_counted_in_it(make: Callable[..., Any]) -> None:
    cluster = Cluster()
    a, b, c = (Replica(cluster, seed, make, sync_every=4) for seed in range(3))
    enter(cluster, [a, b])
    assert train(cluster, [a, b], 4) == [None, None]
    # The same two without a newcomer, for comparison.
    alone = Cluster()
    others = [Replica(alone, seed, make, sync_every=4) for seed in range(2)]
    enter(alone, others)
    train(alone, others, 8)
    replicas, optimizer = [a, b, c], c.optimizer

    def step(number: int) -> None:
        if number == 2:
            c.method.__enter__()
        else:
            replicas[number].train(4)

    assert cluster.run([r.manager for r in replicas], step) == [None] * 3
    assert_equal(replicas)
    torch.testing.assert_close(a.w, others[0].w)
    # The newcomer has the inner optimiser of the first, its buffers, and no residual.
    inner = a.optimizer.state[a.model.w]["momentum_buffer"]
    assert torch.equal(optimizer.state[c.model.w]["momentum_buffer"], inner)
    assert torch.equal(c.model.seen, a.model.seen)
    if make is SparseLoCo:
        assert not c.residual.any()
        assert a.residual.any()
    assert train(cluster, replicas, 4) == [None] * 3
    assert_equal(replicas)


@pytest.mark.parametrize("make", [DiLoCo, SparseLoCo])
def test_a_sync_that_fails_is_repeated_as_if_it_had_not_been(make: Callable[..., Any]) -> None:
    cluster, calm = Cluster(), Cluster()
    replicas = [Replica(cluster, seed, make, sync_every=4) for seed in range(2)]
    others = [Replica(calm, seed, make, sync_every=4) for seed in range(2)]
    enter(cluster, replicas)
    enter(calm, others)
    train(cluster, replicas, 4)
    train(calm, others, 8)
    replicas[1].manager._pg.calls_until_broken = 0
    assert train(cluster, replicas, 4) == [None, None]
    assert torch.equal(replicas[0].w, others[0].w)
    assert_equal(replicas)
    stats = replicas[0].method.stats()
    assert (stats["rollbacks"], stats["syncs"], stats["commits"]) == (1, 2, 3)


def test_a_replica_that_missed_a_sync_continues_from_the_anchor() -> None:
    cluster = Cluster()
    a, b = (Replica(cluster, seed, SparseLoCo, sync_every=2) for seed in range(2))
    enter(cluster, [a, b])
    train(cluster, [a, b], 2)

    def step(number: int) -> None:
        # b alone does not commit; it tries again while a trains, and joins its next sync.
        (a, b)[number].train(4 if number == 0 else 2)

    b.manager.refuses_commit = True
    assert cluster.run([a.manager, b.manager], step) == [None, None]
    assert_equal([a, b])
    assert not b.residual.any()
    assert b.method.stats()["received_states"] == 2
    assert train(cluster, [a, b], 2) == [None, None]
    assert_equal([a, b])


def test_a_drift_that_is_not_finite_raises_on_all_and_leaves_no_trace() -> None:
    cluster = Cluster()
    replicas = [Replica(cluster, seed, SparseLoCo, sync_every=2) for seed in range(2)]
    enter(cluster, replicas)
    train(cluster, replicas, 2)
    anchors, residuals = [r.anchor.clone() for r in replicas], [r.residual for r in replicas]
    replicas[1].target[3, 3] = torch.inf
    found = train(cluster, replicas, 2)
    assert [type(error) for error in found] == [NonFiniteError] * 2
    for replica, anchor, residual in zip(replicas, anchors, residuals, strict=True):
        assert torch.equal(replica.anchor, anchor)
        assert torch.equal(replica.residual, residual)


def test_a_newcomer_with_other_settings_or_another_model_is_refused_by_name() -> None:
    cluster = Cluster()
    a = Replica(cluster, 0, DiLoCo, sync_every=2)
    slow = Replica(cluster, 1, DiLoCo, sync_every=2, outer_lr=0.5)
    enter(cluster, [a])

    def step(number: int) -> None:
        if number == 0:
            a.train(2)
        else:
            slow.method.__enter__()

    def alone(_: int) -> None:
        a.train(2)

    # The first tries again, until the quorum is formed without the newcomer.
    first, error = cluster.run([a.manager, slow.manager], step)
    assert first is None
    assert isinstance(error, ConfigError)
    assert "outer.rate: 0.7 on rank [0]; 0.5 on rank [1]" in str(error)
    assert cluster.run([a.manager], alone) == [None]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m, *model: DiLoCo(FakeManager(Cluster()), *model, sync_every=2), "quorum=False"),
        (lambda m, *model: DiLoCo(m, *model, sync_every=0), "sync_every must be at least 1"),
        (lambda m, *model: DiLoCo(object(), *model, sync_every=2), "torchft"),
        (
            lambda m, *model: DiLoCo(m, *model, sync_every=2, exchange="hierarchical:node=2"),
            "one level",
        ),
        (
            lambda m, *model: SparseLoCo(
                m, *model, sync_every=2, exchange="gather:aggregate=median"
            ),
            "aggregate must be mean",
        ),
    ],
)
def test_bad_input(make: Callable[..., object], text: str) -> None:
    model = nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((ConfigError, ImportError), match=text):
        make(FakeManager(Cluster(), use_async_quorum=False), model, optimizer)
