"""Properties of all decentralised methods: real ranks, bytes, state, statistics, bad input."""

import io
import logging
import multiprocessing
from contextlib import ExitStack
from typing import Any

import neighbor_jobs as jobs
import pytest
import torch
from local_workers import (
    SimulatedRun,
    adam,
    all_equal,
    momentum_sgd,
    plain_sgd,
    small_model,
    take_step,
    weights,
)
from torch import nn

from deadlines import scaled
from gradwire.decentralized import BEER, CGT, DSGD, ChocoSGD, Graph, simulated
from gradwire.decentralized.base import DecentralizedMethod
from gradwire.errors import ConfigError, NonFiniteError, PeerError
from gradwire.wire.layout import align
from processes import Ranks, free_port

every_method = pytest.mark.parametrize("name", sorted(jobs.METHODS))


def simulated_run(name: str, **settings: Any) -> SimulatedRun:
    method, args, own = jobs.METHODS[name]
    return SimulatedRun(method, *args, size=4, **{"optimizer": momentum_sgd, **own, **settings})


def through_file(state: object) -> Any:
    """Returns the state as loaded from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_method
def test_real_ranks_are_bitwise_equal_to_simulated_ones(four_ranks: Ranks, name: str) -> None:
    with simulated_run(name) as run:
        run.train(7)
        with ExitStack() as stack:
            for worker in run.workers:
                stack.enter_context(worker.averaged())
            mean = weights(run.models[0])
        stats = [worker.stats() for worker in run.workers]
    results = four_ranks.run(jobs.trained_rank, name, 7)
    for rank, (real, real_mean, real_stats) in enumerate(results):
        assert torch.equal(real, run.weights()[rank])
        # An all-reduce may add in another order than rank by rank.
        torch.testing.assert_close(real_mean, mean)
        for key in ("steps", "syncs", "sent_bytes", "received_bytes", "message_bytes", "ratio"):
            assert real_stats[key] == stats[rank][key]
        assert real_stats["neighbor_distance"] == stats[rank]["neighbor_distance"]
        assert real_stats["sent_bytes"] > 0


@every_method
def test_resumes_bitwise(name: str) -> None:
    with simulated_run(name) as run:
        run.train(5)
        states = through_file([worker.state_dict() for worker in run.workers])
        models = through_file([model.state_dict() for model in run.models])
        optimizers = through_file([optimizer.state_dict() for optimizer in run.optimizers])
        run.train(4, first=5)
    again = simulated_run(name)
    for rank, worker in enumerate(again.workers):
        again.models[rank].load_state_dict(models[rank])
        again.optimizers[rank].load_state_dict(optimizers[rank])
        worker.load_state_dict(states[rank])
    with again:
        again.train(4, first=5)
    assert all(torch.equal(a, b) for a, b in zip(run.weights(), again.weights(), strict=True))
    assert again.workers[0].stats()["steps"] == 9


@every_method
def test_it_trains_with_any_optimiser(name: str) -> None:
    with simulated_run(name, optimizer=adam) as run:
        losses = run.train(80)
        assert not all_equal(run.weights())
    assert losses[-1] < 0.7 * losses[0]


@every_method
def test_bytes_are_those_of_the_messages_on_the_edges(name: str) -> None:
    steps = 6
    with simulated_run(name) as run:
        run.train(steps)
        gossips = [worker.gossip for worker in run.workers]
        stats = [worker.stats() for worker in run.workers]
        for rank, (gossip, own) in enumerate(zip(gossips, stats, strict=True)):
            mixing = gossip.mixing
            peers = [mixing.neighbors(rank, sync) for sync in range(own["syncs"])]
            edges = sum(len(peer.targets) for peer in peers)
            if name == "choco-variable":
                # Lengths of 8 bytes go ahead of messages that only the sender knows the length of.
                assert own["calls"] == 2 * own["syncs"]
                assert own["message_bytes"] > own["syncs"] * 8
                continue
            assert own["calls"] == own["syncs"]
            assert own["sent_bytes"] == edges * gossip.message_bytes()
            assert own["message_bytes"] == own["syncs"] * gossip.message_bytes()
        assert sum(own["sent_bytes"] for own in stats) == sum(
            own["received_bytes"] for own in stats
        )


def test_a_message_by_hand() -> None:
    """A byte for the guard, 10 % of two matrices in 16 bits with packed indices, two biases."""
    with simulated_run("choco") as run:
        run.train(2)
        worker = run.workers[0]
        sparse = sum(
            worker.gossip.copies[0].engine.lanes[n].message_bytes for n in ("0.weight", "2.weight")
        )
        assert worker.gossip.message_bytes() == align(1) + sparse + 4 * (48 + 32)
        stats = worker.stats()
    parameters = 4 * (40 * 48 + 48 + 48 * 32 + 32)
    assert stats["dense_bytes"] == 2 * (2 * 3 * parameters // 4)
    assert stats["planned_ratio"] == pytest.approx(stats["ratio"], rel=1e-3)


def test_consensus_and_statistics() -> None:
    with simulated_run("choco") as run:
        run.train(3)
        before = run.weights()
        assert run.workers[0].stats()["consensus_distance"] is None
        with ExitStack() as stack:
            for worker in run.workers:
                stack.enter_context(worker.consensus())
            assert all_equal(run.weights())
            mean = run.weights()[0]
        assert all(torch.equal(a, b) for a, b in zip(before, run.weights(), strict=True))
        for worker, own in zip(run.workers, before, strict=True):
            stats = worker.stats()
            assert stats["consensus_distance"] == pytest.approx(
                float((own - mean).norm()), rel=1e-4
            )
            assert stats["neighbor_distance"] > 0
            assert stats["topology"] == "Ring"
            assert stats["spectral_gap"] == worker.spectral_gap == pytest.approx(2 / 3)
            assert (stats["neighbors"], stats["exchange"]) == (2, "neighbors")
            assert 0 < stats["relative_error"] < 1


def test_the_spectral_gap_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gradwire"):
        simulated_run("choco")
    assert caplog.messages == ["ChocoSGD: Ring of 4 workers: spectral gap 0.6667"]


def test_parameters_that_are_not_contiguous_are_mixed_too() -> None:
    def transposed() -> nn.Module:
        model = small_model()
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
        return model

    def run(model: Any) -> list[torch.Tensor]:
        with simulated_run("cgt", model=model, optimizer=plain_sgd) as one:
            one.train(5)
        return one.weights()

    pairs = zip(run(transposed), run(small_model), strict=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def test_half_precision_parameters() -> None:
    with simulated_run("choco", model=lambda: small_model().to(torch.bfloat16)) as run:
        for step in range(30):
            for rank, (model, its) in enumerate(zip(run.models, run.optimizers, strict=True)):
                generator = torch.Generator().manual_seed(step + 100 * rank)
                inputs = torch.randn(16, 40, generator=generator).bfloat16()
                its.zero_grad()
                nn.functional.mse_loss(model(inputs), inputs[:, :32]).backward()
                its.step()
        assert run.workers[0].gossip.copies[0].own["0.weight"].dtype == torch.float32
        assert run.workers[0].stats()["neighbor_distance"] < 1


@pytest.mark.parametrize("name", ["dsgd", "choco", "cgt"])
def test_values_that_are_not_finite_stop_the_worker_and_its_neighbors(name: str) -> None:
    with simulated_run(name) as run:
        run.train(2)
        with torch.no_grad():
            run.models[1][0].weight[0, 0] = float("nan")
        with pytest.raises(NonFiniteError, match=r"what workers \[1\] sent"):
            run.step(2)


def test_a_worker_that_runs_ahead_is_an_error() -> None:
    with simulated_run("cgt") as run:
        take_step(run.models[0], run.optimizers[0], 0, 0)
        with pytest.raises(PeerError, match="simulated worker 0 continues"):
            take_step(run.models[0], run.optimizers[0], 1, 0)


def build(method: type[DecentralizedMethod], *args: Any, **settings: Any) -> DecentralizedMethod:
    model = small_model()
    return method(model, plain_sgd(model), *args, process_group=simulated(4)[0], **settings)


@pytest.mark.parametrize(
    ("method", "args", "settings", "text"),
    [
        (
            ChocoSGD,
            ("powersgd:rank=2",),
            {"gamma": 0.1},
            "ChocoSGD: powersgd:rank=2 defines its own rounds",
        ),
        (CGT, ("signsgd",), {"gamma": 0.1}, "CGT: signsgd sends votes"),
        (BEER, ("variance",), {"gamma": 0.1}, "BEER: variance defines its own rounds"),
        (ChocoSGD, ("terngrad",), {"gamma": 0.1}, "ChocoSGD: terngrad is needed as a contraction"),
        (CGT, ("topk:ratio=2",), {"gamma": 0.1}, r"topk: ratio must be in \(0, 1\], got 2"),
        (ChocoSGD, (), {"gamma": 0.0}, r"ChocoSGD: gamma must be in \(0, 1\], got 0.0"),
        (CGT, (), {"gamma": 1.5}, r"CGT: gamma must be in \(0, 1\], got 1.5"),
        (CGT, (), {"gamma": 0.1, "alpha": 0}, r"CGT: alpha must be in \(0, 1\], got 0"),
        (DSGD, (), {"sync_every": 0}, "DSGD: sync_every must be at least 1, got 0"),
        (DSGD, (), {"topology": "rung"}, "no topology named 'rung'; did you mean 'ring'"),
        (DSGD, (), {"topology": Graph([(0, 1)])}, r"not connected.*\[2, 3\]"),
        (DSGD, (), {"nan_policy": "skip"}, "DSGD: nan_policy must be one of"),
        (ChocoSGD, (), {"gamma": 0.1, "topology": "one_peer"}, "ChocoSGD: keeps one mean .* DSGD"),
        (
            BEER,
            (),
            {"gamma": 0.1, "topology": "one_peer"},
            "weights must be the same at every step",
        ),
        (
            ChocoSGD,
            ({"0.*": {"method": "topk:ratio=0.1", "memory": "residual"}, "default": "none"},),
            {"gamma": 0.1},
            "leave memory 'residual' out of the policy",
        ),
    ],
    ids=str,
)
def test_refusals(
    method: type[DecentralizedMethod], args: Any, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        build(method, *args, **settings)


def test_methods_by_pattern_of_parameter_name() -> None:
    policies = {"0.*": "topk:ratio=0.1", "default": "efsign"}
    with SimulatedRun(ChocoSGD, policies, size=4, gamma=0.2) as run:
        losses = run.train(60)
        assert len(run.workers[0].stats()["policies"]) == 2
    assert losses[-1] < 0.85 * losses[0]


def test_a_state_of_another_topology_is_refused() -> None:
    with simulated_run("choco") as run:
        run.train(2)
        state = run.workers[0].state_dict()
    other = simulated_run("choco", topology="complete")
    with pytest.raises(ConfigError, match=r"topology\.class is"):
        other.workers[0].load_state_dict(state)


def test_ranks_with_different_topologies_find_out_at_the_start(four_ranks: Ranks) -> None:
    for text in four_ranks.run(jobs.differing_settings):
        assert "topology.class" in text
        assert "on rank [0]" in text


def test_a_silent_neighbor_is_an_error_within_the_timeout(four_ranks: Ranks) -> None:
    timeout_s = scaled(3)
    results = four_ranks.run(jobs.silent_neighbor, timeout_s)
    assert results[1] == ("silent", 0.0)
    for rank in (0, 2, 3):
        text, took_s = results[rank]
        assert text.startswith("neighbors among 4 ranks failed on rank"), text
        assert took_s < 2 * timeout_s


def test_a_dead_neighbor_is_noticed_at_once() -> None:
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=jobs.dies, args=(rank, port, results)) for rank in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=scaled(50)) for _ in range(3)]
    for process in processes:
        process.join(scaled(10))
    assert sorted(rank for rank, _, _ in found) == [0, 2, 3]
    for _, text, took_s in found:
        assert "neighbors among 4 ranks failed" in text
        assert took_s < scaled(20)
