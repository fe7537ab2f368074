"""Gradients inside a Manager: sums over commits and rollbacks, joins, leaves, and refusals."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_torchft import Cluster, FakeManager
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire import ConfigError, PeerError
from gradwire.elastic import ElasticReducer, attach

SHAPE = (30, 40)


class Replica:
    """A model of one matrix that descends along the mean gradient with rate 1."""

    def __init__(
        self, cluster: Cluster, spec: str, *, is_async: bool = True, **options: Any
    ) -> None:
        self.manager = FakeManager(cluster, use_async_quorum=is_async)
        self.model = nn.Module()
        self.model.w = nn.Parameter(torch.randn(SHAPE))
        self.manager.register_state_dict_fn(
            "default", self.model.load_state_dict, self.model.state_dict
        )
        self.reducer: ElasticReducer = attach(self.manager, self.model, spec, **options)

    @property
    def w(self) -> Tensor:
        return self.model.w

    @property
    def residual(self) -> Tensor:
        """Returns what waits to be sent: zeros for a method that sends everything."""
        (lane,) = self.reducer._engine.lanes.values()
        unsent = lane.memory.unsent(lane.memory_state)
        return torch.zeros(SHAPE) if unsent is None else unsent.clone().view(SHAPE)

    def step(self, grad: Tensor) -> bool:
        self.manager.start_quorum()
        self.w.grad = grad.clone()
        committed = self.manager.should_commit()
        if committed:
            with torch.no_grad():
                self.w.sub_(self.w.grad)
        return committed


def run(
    cluster: Cluster, replicas: Sequence[Replica], grads: Sequence[Tensor]
) -> list[bool | Exception]:
    return cluster.run([r.manager for r in replicas], lambda i: replicas[i].step(grads[i]))


def noise(seed: int, count: int) -> list[Tensor]:
    return [*torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))]


def assert_equal(replicas: Sequence[Replica]) -> None:
    for other in replicas[1:]:
        assert torch.equal(other.w, replicas[0].w)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("topk:ratio=0.05", {}),
        ("int4", {}),
        ("topk:ratio=0.05 | qsgd:bits=4", {"memory": "residual"}),
        ("powersgd:rank=2", {}),
        ("none", {}),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
def test_nothing_is_lost_but_the_residual_of_who_leaves(
    spec: str, options: dict[str, Any], is_async: bool
) -> None:
    """Commits T, F, T, T with a leave and a join.

    What the parameters have moved, times the replicas that moved them, plus all residuals, is the
    sum of the committed gradients, less the residual of the replica that left.
    """
    cluster = Cluster()
    a, b, c, d = (Replica(cluster, spec, is_async=is_async, **options) for _ in range(4))
    torch.manual_seed(0)
    run(cluster, [a, b, c], [torch.zeros(SHAPE)] * 3)  # all begin with the parameters of the first
    assert_equal([a, b, c])
    sent, moved = torch.zeros(SHAPE), torch.zeros(SHAPE)

    def step(replicas: list[Replica], commits: bool, seed: int, silent: int = 0) -> None:
        nonlocal sent, moved
        before, residuals = a.w.detach().clone(), [r.residual for r in replicas]
        grads = noise(seed, len(replicas))
        for r in replicas:
            r.manager.refuses_commit = not commits
        assert run(cluster, replicas, grads) == [commits] * len(replicas)
        contributors = replicas[: len(replicas) - silent]
        moved += len(contributors) * (before - a.w.detach())
        if commits:
            sent += sum(grads[: len(contributors)], torch.zeros(SHAPE))
            assert_equal(replicas)
        else:
            assert torch.equal(a.w, before)
            for r, residual in zip(replicas, residuals, strict=True):
                assert torch.equal(r.residual, residual)

    step([a, b, c], True, 1)
    step([a, b, c], False, 2)
    lost = b.residual
    step([a, c], True, 3)
    # With an asynchronous quorum a replica computes its first gradient before it has the state.
    step([a, c, d], True, 4, silent=int(is_async))
    step([a, c, d], True, 5)
    waiting = sum((r.residual for r in (a, c, d)), lost)
    torch.testing.assert_close(moved + waiting, sent, atol=1e-4, rtol=0)
    stats = a.reducer.stats()
    assert (stats["joined_replicas"], stats["lost_replicas"]) == (1, 1)
    assert (stats["commits"], stats["rollbacks"]) == (5, 1)
    assert d.reducer.stats()["received_states"] == 1


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("topk:ratio=0.05", {"exchange": "sharded"}),
        ("topk:ratio=0.05", {"memory": "ef21"}),
        ("powersgd:rank=2", {}),
    ],
)
def test_state_that_replicas_share_begins_anew_with_a_quorum(
    spec: str, options: dict[str, Any]
) -> None:
    cluster = Cluster()
    a, b, c = (Replica(cluster, spec, **options) for _ in range(3))
    for number, replicas in enumerate([[a, b], [a, b], [a], [a, c], [a, c], [a, c, b], [a, c, b]]):
        assert run(cluster, replicas, noise(number, len(replicas))) == [True] * len(replicas)
        assert_equal(replicas)
    assert a.reducer.stats()["quorums"] == 4


def test_a_replica_that_alone_failed_to_commit_continues_from_a_peer() -> None:
    """Others have applied what it sent, so its residual must not send the rest of it again."""
    cluster = Cluster()
    a, b = (Replica(cluster, "topk:ratio=0.05") for _ in range(2))
    for seed in (1, 2):
        assert run(cluster, [a, b], noise(seed, 2)) == [True, True]
    b.manager.refuses_commit = True
    assert run(cluster, [a, b], noise(3, 2)) == [True, False]
    norm = float(b.residual.norm())
    assert norm > 0
    assert run(cluster, [a, b], noise(4, 2)) == [True, True]
    assert_equal([a, b])
    # It was silent in that step, and its residual is zero.
    assert not b.residual.any()
    assert b.reducer.stats()["dropped_norm"] == pytest.approx(norm)


@pytest.mark.parametrize("calls", [0, 1])
def test_a_lost_connection_is_not_raised_and_rolls_back(calls: int) -> None:
    cluster = Cluster()
    replicas = [Replica(cluster, "topk:ratio=0.05") for _ in range(3)]
    for seed in (1, 2):
        run(cluster, replicas, noise(seed, 3))
    parameters, residuals = replicas[0].w.detach().clone(), [r.residual for r in replicas]
    replicas[1].manager._pg.calls_until_broken = 0
    assert run(cluster, replicas, noise(3, 3)) == [False] * 3
    # Also while the replicas of the quorum that follows introduce themselves.
    replicas[1].manager._pg.calls_until_broken = calls
    assert run(cluster, replicas, noise(3, 3)) == [False] * 3
    for replica, residual in zip(replicas, residuals, strict=True):
        assert torch.equal(replica.w, parameters)
        assert torch.equal(replica.residual, residual)
        assert isinstance(replica.manager.errored(), PeerError)
    assert run(cluster, replicas, noise(3, 3)) == [True] * 3
    assert_equal(replicas)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_newcomer_with_another_spec_is_refused_by_name(is_async: bool) -> None:
    cluster = Cluster()
    a, b = (Replica(cluster, "topk:ratio=0.05", is_async=is_async) for _ in range(2))
    odd = Replica(cluster, "topk:ratio=0.1", is_async=is_async)
    for seed in (1, 2):
        run(cluster, [a, b], noise(seed, 2))
    # The newcomer is the first in the order of ranks, and refused all the same.
    error, *others = run(cluster, [odd, a, b], noise(3, 3))
    assert others == [False, False]
    assert isinstance(error, ConfigError)
    text = str(error)
    assert text.startswith("replica 0 cannot join replica 1: ranks are set up differently")
    assert "ratio: 0.1 on rank [0]; 0.05 on rank [1, 2]" in text
    # Nobody waits for it, even if its process goes on.
    assert odd.manager.is_shut_down
    assert run(cluster, [a, b], noise(4, 2)) == [True, True]
    assert_equal([a, b])


@pytest.mark.parametrize("key", ["version", "code"])
def test_a_newcomer_of_another_version_or_code_is_refused_by_name(key: str) -> None:
    cluster = Cluster()
    a, odd = (Replica(cluster, "int4") for _ in range(2))
    run(cluster, [a], noise(1, 1))
    identity = odd.reducer._identity
    odd.reducer._exchange._settings = lambda plan: {**identity(plan), key: "other"}
    first, error = run(cluster, [a, odd], noise(2, 2))
    assert first is False
    assert isinstance(error, ConfigError)
    assert f"{key}: " in str(error)
    assert run(cluster, [a], noise(3, 1)) == [True]


def test_bytes_are_those_of_the_messages() -> None:
    cluster = Cluster()
    replicas = [Replica(cluster, "topk:ratio=0.05", exchange="gather") for _ in range(3)]
    for seed in (1, 2):
        run(cluster, replicas, noise(seed, 3))
    for replica in replicas:
        (lane,) = replica.reducer._engine.lanes.values()
        stats, given = replica.reducer.stats(), replica.manager._pg.given_bytes
        introduction, *messages = given
        assert introduction == ("allgather", 64)
        assert [kind for kind, _ in messages] == ["allgather", "allgather"]
        sent = 2 * sum(nbytes for _, nbytes in messages)
        assert (stats["sent_bytes"], stats["auxiliary_bytes"]) == (sent, 2 * 64)
        # Four bytes are the flag of the guard.
        assert messages[0][1] == lane.message_bytes + 4


def test_a_gradient_that_is_not_finite_is_not_committed_anywhere() -> None:
    cluster = Cluster()
    replicas = [Replica(cluster, "topk:ratio=0.05", nan_policy="raise") for _ in range(2)]
    for seed in (1, 2):
        run(cluster, replicas, noise(seed, 2))
    before, residuals = replicas[0].w.detach().clone(), [r.residual for r in replicas]
    bad = noise(3, 2)
    bad[1][3, 3] = torch.nan
    assert run(cluster, replicas, bad) == [False, False]
    assert torch.equal(replicas[0].w, before)
    assert all(torch.equal(r.residual, old) for r, old in zip(replicas, residuals, strict=True))
    assert run(cluster, replicas, noise(4, 2)) == [True, True]


def test_reduce_comes_before_clipping_and_runs_once_a_step() -> None:
    cluster = Cluster()
    a = Replica(cluster, "none")

    def step(_: int) -> float:
        a.manager.start_quorum()
        a.w.grad = torch.ones(SHAPE)
        a.reducer.reduce()
        with pytest.raises(ConfigError, match="were averaged already"):
            a.reducer.reduce()
        norm = float(nn.utils.clip_grad_norm_([a.model.w], 1.0))
        assert a.manager.should_commit()
        return norm

    assert cluster.run([a.manager], step) == [pytest.approx(1200**0.5)]
    assert float(a.w.grad.norm()) == pytest.approx(1.0)
    assert a.reducer.metrics("train/")["train/step"] == 1


def test_detach_returns_the_manager_as_it_was() -> None:
    cluster = Cluster()
    a = Replica(cluster, "topk:ratio=0.05")
    run(cluster, [a], noise(1, 1))
    a.reducer.detach()
    assert "should_commit" not in vars(a.manager)
    assert [*a.manager._user_state_dicts] == ["default"]
    with pytest.raises(ConfigError, match="this reducer is detached"):
        a.reducer.reduce()
    attach(a.manager, a.model, "int4")


class TooOld:
    """The Manager of torchft 0.1: one state, and no key."""

    def start_quorum(self) -> None: ...

    def should_commit(self) -> bool: ...

    def shutdown(self) -> None: ...


def linear() -> nn.Linear:
    return nn.Linear(40, 30)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m: attach(TooOld(), linear(), "int4"), r"needs torchft >= 0\.2, got .*register_st"),
        (lambda m: attach(m, linear(), "auto"), "auto is not supported here"),
        (
            lambda m: attach(m, linear(), "topk:ratio=0.1", controller="gravac"),
            "controller is not supported",
        ),
        (
            lambda m: attach(m, linear(), "topk:ratio=0.1", check_every=5),
            "check_every is not supported",
        ),
        (
            lambda m: attach(m, linear(), "topk:ratio=0.1", exchange="hierarchical:node=2"),
            "one level",
        ),
        (
            lambda m: attach(m, linear(), "signsgd", exchange="gather:aggregate=median"),
            r"aggregate must be mean, got \['median'\].*use_async_quorum=False",
        ),
        (
            lambda m: (attach(m, linear(), "int4"), attach(m, linear(), "int4")),
            "used by gradwire.elastic already",
        ),
    ],
)
def test_bad_input(make: Callable[[FakeManager], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(FakeManager(Cluster()))


def test_other_wrappers_and_spares_are_refused() -> None:
    manager = FakeManager(Cluster())
    model = nn.Module.__new__(DDP)
    with pytest.raises(ConfigError, match="pass the module itself"):
        attach(manager, model, "int4")
    manager._replica_world_size_mode = SimpleNamespace(name="FIXED_WITH_SPARES")
    with pytest.raises(ConfigError, match="world_size_mode must be DYNAMIC, got FIXED_WITH_SPARES"):
        attach(manager, linear(), "int4")


def test_a_manager_without_the_state_of_the_model_is_refused() -> None:
    cluster = Cluster()
    manager, model = FakeManager(cluster), linear()
    attach(manager, model, "int4")

    def step(_: int) -> bool:
        manager.start_quorum()
        model(torch.ones(1, 40)).sum().backward()
        return manager.should_commit()

    (error,) = cluster.run([manager], step)
    assert isinstance(error, ConfigError)
    assert "no state to hand to a replica that joins" in str(error)
