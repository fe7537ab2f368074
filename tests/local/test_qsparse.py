"""Qsparse-local-SGD: compared with its definition, and its guarantees."""

import pytest
import torch
from local_workers import (
    SimulatedRun,
    all_equal,
    largest,
    momentum_sgd,
    plain_sgd,
    small_model,
    take_step,
    trained,
    weights,
)
from torch import Tensor
from torch.optim import Optimizer

from gradwire.errors import ConfigError
from gradwire.local import QsparseLocalSGD, simulated
from gradwire.spec import parse

SPECS = [
    "topk:ratio=0.1 | qsgd:bits=4",
    "topk:ratio=0.1 | qsgd:bits=3,bucket=32,scaled=true",
    "topk:ratio=0.1 | sign",
    "randomk:ratio=0.5",
    "powersgd:rank=4",
]


def by_definition(
    size: int, steps: int, gap: int, ratio: float, decay_at: int | None = None
) -> Tensor:
    """Sends the top-k of residual plus drift of matrices, and the whole drift of vectors.

    At a decay of the learning rate, residuals are dropped at the last sync before it.
    """
    models = [small_model() for _ in range(size)]
    optimizers = [momentum_sgd(model) for model in models]
    anchor = [p.detach().clone() for p in models[0].parameters()]
    residuals = [[torch.zeros_like(a) for a in anchor] for _ in range(size)]
    for step in range(steps):
        if step == decay_at:
            decay(optimizers)
            residuals = [[torch.zeros_like(a) for a in anchor] for _ in range(size)]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            take_step(model, optimizer, step, rank)
        if (step + 1) % gap:
            continue
        for place, common in enumerate(anchor):
            sent = []
            for rank, model in enumerate(models):
                drift = residuals[rank][place] + common - list(model.parameters())[place].detach()
                sent.append(largest(drift, ratio))
                residuals[rank][place] = drift - sent[-1]
            common.sub_(torch.stack(sent).mean(0))
            for model in models:
                list(model.parameters())[place].data.copy_(common)
    return torch.cat([weights(model) for model in models])


def decay(optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] /= 10


@pytest.mark.parametrize("gap", [1, 4])
def test_matches_its_definition(gap: int) -> None:
    spec = "topk:ratio=0.1,values=fp32"
    ours = trained(QsparseLocalSGD, spec, sync_every=gap, optimizer=momentum_sgd, steps=14)
    expected = by_definition(size=3, steps=14, gap=gap, ratio=0.1)
    torch.testing.assert_close(torch.cat(ours), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay_at", [6, 8])
def test_residuals_are_dropped_at_a_decay_as_in_the_paper(
    decay_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a gap or at its beginning: residuals change at syncs only."""
    spec, settings = "topk:ratio=0.1,values=fp32", {"sync_every": 4, "forget_below": 0.5}
    caplog.set_level("INFO", "gradwire")
    with SimulatedRun(QsparseLocalSGD, spec, optimizer=momentum_sgd, **settings) as run:
        run.train(decay_at)
        decay(run.optimizers)
        run.train(14 - decay_at, first=decay_at)
    expected = by_definition(size=3, steps=14, gap=4, ratio=0.1, decay_at=decay_at)
    torch.testing.assert_close(torch.cat(run.weights()), expected, rtol=1e-5, atol=1e-6)
    lines = [record.message for record in caplog.records]
    assert lines == ["the learning rate has fallen from 0.05 to 0.005; residuals are dropped"] * 3


@pytest.mark.parametrize("spec", SPECS)
def test_workers_are_equal_at_every_sync_and_only_there(spec: str) -> None:
    with SimulatedRun(QsparseLocalSGD, spec, sync_every=4) as run:
        for step in range(12):
            run.step(step)
            assert all_equal(run.weights()) == (step % 4 == 3)


def final_loss(spec: str) -> float:
    with SimulatedRun(QsparseLocalSGD, spec, sync_every=4, size=2, optimizer=momentum_sgd) as run:
        return sum(run.train(120)[-10:]) / 10


def test_learns_nearly_as_well_as_without_compression() -> None:
    dense = final_loss("none")
    assert dense < 0.1
    for spec in SPECS:
        assert final_loss(spec) < 2 * dense, spec


def test_the_residual_keeps_what_was_not_sent() -> None:
    """The sum of all drifts is sent in the end, but for the residuals."""
    with SimulatedRun(QsparseLocalSGD, "topk:ratio=0.1,values=fp32", sync_every=2, size=1) as run:
        [worker] = run.workers
        run.train(6)
        [engine] = worker._engines()
        residual = engine.lanes["0.weight"].memory_state["residual"]
        assert residual.count_nonzero() == round(0.9 * residual.numel())
        assert worker.stats()["residual_norm"] > 0


def residual_norm(forget_below: float | None, new_rate: float) -> float:
    """Returns the norm of residuals after the sync that follows a change of the rate."""
    settings = {"sync_every": 2, "forget_below": forget_below}
    with SimulatedRun(QsparseLocalSGD, "topk:ratio=0.01", **settings) as run:
        run.train(4)
        for optimizer in run.optimizers:
            optimizer.param_groups[0]["lr"] = new_rate
        run.train(2, first=4)
        return float(run.workers[0].stats()["residual_norm"])


def test_residuals_can_be_dropped_where_the_learning_rate_decays() -> None:
    without = residual_norm(None, 1e-6)
    assert residual_norm(0.5, 1e-6) < 1e-3 * without
    assert residual_norm(0.5, 0.06) == residual_norm(None, 0.06)


def test_bytes_are_those_of_the_messages() -> None:
    with SimulatedRun(
        QsparseLocalSGD, "topk:ratio=0.1 | sign", sync_every=4, exchange="gather"
    ) as run:
        run.train(9)
        stats = run.workers[0].stats()
    assert stats["steps"] == 9
    assert stats["syncs"] == stats["calls"] == 2
    # Positions of k of n entries, a bit each, a scale; two vectors in float32; the non-finite flag.
    codec = parse("topk:ratio=0.1 | sign")
    message = codec.nbytes((48, 40)) + codec.nbytes((32, 48)) + 4 * (48 + 32) + 4
    assert stats["message_bytes"] == 2 * message
    assert stats["sent_bytes"] == 2 * 2 * message


def test_error_feedback_needs_a_contraction() -> None:
    message = "qsgd:bits=2 does not go with memory 'residual', which needs a contraction"
    with pytest.raises(ConfigError, match=message):
        SimulatedRun(QsparseLocalSGD, "qsgd:bits=2", sync_every=4)
    with SimulatedRun(QsparseLocalSGD, "qsgd:bits=2", sync_every=4, memory="none") as run:
        losses = run.train(40)
    assert losses[-1] < losses[0]


def test_votes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"QsparseLocalSGD: signsgd .* not its length"):
        SimulatedRun(QsparseLocalSGD, "signsgd", sync_every=4, memory="none")


@pytest.mark.parametrize("share", [0, -1, 1.5, "half"])
def test_share_out_of_range(share: object) -> None:
    with pytest.raises(ConfigError, match=r"^QsparseLocalSGD: forget_below must be in"):
        SimulatedRun(QsparseLocalSGD, "topk:ratio=0.1", sync_every=4, forget_below=share)


def test_sixteen_bit_parameters_follow_a_finer_anchor() -> None:
    def half() -> torch.nn.Module:
        return small_model().to(torch.bfloat16)

    models = [half() for _ in range(2)]
    optimizers = [plain_sgd(model) for model in models]
    group = simulated(2)
    workers = [
        QsparseLocalSGD(m, o, "topk:ratio=0.1", sync_every=1, process_group=w)
        for m, o, w in zip(models, optimizers, group, strict=True)
    ]
    with workers[0], workers[1]:
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 0.01)
                optimizer.step()
    assert all_equal([weights(model) for model in models])
    assert all(p.dtype == torch.bfloat16 for m in models for p in m.parameters())
    anchor = workers[0]._common()["0.weight"]
    assert anchor.dtype == torch.float32
    rounded = anchor.to(torch.bfloat16)
    assert torch.equal(rounded, next(models[0].parameters()).detach().view(-1))
    assert not torch.equal(rounded.float(), anchor)
