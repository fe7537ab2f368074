"""CSER and its variants: compared with the definition, invariants and special cases."""

from collections.abc import Callable

import pytest
import torch
from local_workers import (
    MakeOptimizer,
    SimulatedRun,
    all_equal,
    batch,
    largest,
    momentum_sgd,
    plain_sgd,
    small_model,
    take_step,
    weights,
)
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradwire.compressors.grbs import GRBS
from gradwire.errors import ConfigError
from gradwire.local import CSER, BlockCSER, QsparseLocalSGD
from gradwire.types import EFInput

PAIRS = [
    ("topk:ratio=0.1", "topk:ratio=0.3"),
    ("grbs:ratio=0.1,block=16", "grbs:ratio=0.25,block=16"),
    ("efsign", "topk:ratio=0.1 | qsgd:bits=4"),
    ("powersgd:rank=1", "randomk:ratio=0.2"),
    (None, "topk:ratio=0.1"),
]


def heavy_ball(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def nesterov(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


Direction = Callable[[Tensor, Tensor], Tensor]


def psync(vectors: list[Tensor], ratio: float) -> tuple[list[Tensor], list[Tensor]]:
    sent = [largest(v, ratio) for v in vectors]
    residuals = [v - c for v, c in zip(vectors, sent, strict=True)]
    mean = torch.stack(sent).mean(0)
    return [mean + r for r in residuals], residuals


def by_definition(
    size: int, steps: int, gap: int, c2: float | None, c1: float, direction: Direction
) -> list[Tensor]:
    """Computes M-CSER with learning rate 0.05 and momentum 0.9, as the paper states it."""
    models = [small_model() for _ in range(size)]
    places = range(len(list(models[0].parameters())))
    x = [[p.detach().clone() for p in model.parameters()] for model in models]
    m = [[torch.zeros_like(p) for p in own] for own in x]
    e = [[torch.zeros_like(p) for p in own] for own in x]
    for step in range(1, steps + 1):
        steps_of: list[list[Tensor]] = []
        for rank, model in enumerate(models):
            inputs, targets = batch(step - 1, rank)
            for parameter, own in zip(model.parameters(), x[rank], strict=True):
                parameter.data.copy_(own)
            loss = nn.functional.mse_loss(model(inputs), targets)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            m[rank] = [0.9 * old + grad for old, grad in zip(m[rank], grads, strict=True)]
            pairs = zip(m[rank], grads, strict=True)
            steps_of.append([0.05 * direction(momentum, grad) for momentum, grad in pairs])
        for place in places:
            p = [own[place] for own in steps_of]
            synced, residuals = psync(p, c2) if c2 is not None else (p, p)
            for rank, own in enumerate(x):
                own[place] = own[place] - synced[rank]
                e[rank][place] = e[rank][place] - residuals[rank]
            if step % gap == 0:
                synced, residuals = psync([own[place] for own in e], c1)
                for rank, own in enumerate(x):
                    own[place] = own[place] + synced[rank] - e[rank][place]
                    e[rank][place] = residuals[rank]
    return [torch.cat([p.reshape(-1) for p in own]) for own in x]


@pytest.mark.parametrize(
    ("optimizer", "direction"),
    [(heavy_ball, lambda m, g: m), (nesterov, lambda m, g: 0.9 * m + g)],
    ids=["heavy ball", "nesterov"],
)
@pytest.mark.parametrize("updates", [0.1, None])
def test_matches_its_definition(
    optimizer: MakeOptimizer, direction: Direction, updates: float | None
) -> None:
    specs = updates and f"topk:ratio={updates},values=fp32", "topk:ratio=0.3,values=fp32"
    with SimulatedRun(CSER, *specs, sync_every=3, optimizer=optimizer) as run:
        run.train(8)
    expected = by_definition(3, 8, 3, updates, 0.3, direction)
    for ours, theirs in zip(run.weights(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("exchange", ["auto", "sharded"])
def test_workers_are_equal_without_their_errors(
    pair: tuple[str | None, str], exchange: str
) -> None:
    if exchange == "sharded" and any(spec and "powersgd" in spec for spec in pair):
        pytest.skip("PowerSGD defines its own rounds")
    with SimulatedRun(CSER, *pair, sync_every=4, optimizer=momentum_sgd, exchange=exchange) as run:
        for step in range(10):
            run.step(step)
            commons = [worker._common()["0.weight"] for worker in run.workers]
            assert all_equal(commons)
            for model, worker in zip(run.models, run.workers, strict=True):
                x, e = model[0].weight.detach(), worker.error()["0.weight"]
                torch.testing.assert_close((x - e).view(-1), commons[0], rtol=0, atol=1e-6)
        assert not all_equal(run.weights())
        assert float(run.workers[0].error()["0.weight"].norm()) > 0


def local_sgd(size: int, steps: int, gap: int, optimizer: MakeOptimizer) -> list[Tensor]:
    models = [small_model() for _ in range(size)]
    optimizers = [optimizer(model) for model in models]
    for step in range(steps):
        for rank, (model, own) in enumerate(zip(models, optimizers, strict=True)):
            take_step(model, own, step, rank)
        if (step + 1) % gap == 0:
            with torch.no_grad():
                for together in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack([p.detach() for p in together]).mean(0)
                    for parameter in together:
                        parameter.copy_(mean)
    return [weights(model) for model in models]


@pytest.mark.parametrize("optimizer", [plain_sgd, momentum_sgd])
@pytest.mark.parametrize("method", [CSER, BlockCSER])
def test_all_errors_and_no_updates_is_local_sgd(
    method: type[CSER] | type[BlockCSER], optimizer: MakeOptimizer
) -> None:
    with SimulatedRun(method, None, "none", sync_every=4, optimizer=optimizer) as run:
        run.train(10)
    expected = local_sgd(3, 10, 4, optimizer)
    for ours, theirs in zip(run.weights(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_all_updates_is_sgd_on_the_mean_gradient() -> None:
    with SimulatedRun(CSER, "none", "topk:ratio=0.1", sync_every=4) as run:
        run.train(10)
    model = small_model()
    optimizer = plain_sgd(model)
    for step in range(10):
        optimizer.zero_grad()
        for rank in range(3):
            inputs, targets = batch(step, rank)
            (nn.functional.mse_loss(model(inputs), targets) / 3).backward()
        optimizer.step()
    assert all_equal(run.weights())
    torch.testing.assert_close(run.weights()[0], weights(model), rtol=1e-5, atol=1e-6)


def blocks_of(worker: BlockCSER, name: str, numel: int, step: int) -> Tensor:
    """Returns a mask of the entries of a parameter that are sent after a step."""
    is_reset = step % worker.sync_every == 0
    lane = (worker._errors if is_reset else worker._updates).lanes[name]  # type: ignore[union-attr]
    mask = torch.zeros(numel, dtype=torch.bool)
    if numel < 1024:
        return ~mask
    assert isinstance(lane.compressor, GRBS)
    index = lane.compressor.select(EFInput(torch.zeros(numel)), lane.ctx._replace(step=step))
    mask[index] = True
    return mask


def test_both_implementations_are_one_method() -> None:
    """BlockCSER equals PSync of error buffers on the same blocks.

    How common + e is divided does not matter: e is sent where it is averaged, and 0 afterwards.
    """
    specs = "grbs:ratio=0.1,block=16", "grbs:ratio=0.4,block=16"
    with SimulatedRun(BlockCSER, *specs, sync_every=3, optimizer=momentum_sgd) as run:
        models = [small_model() for _ in run.models]
        optimizers = [momentum_sgd(model) for model in models]
        common = {n: p.detach().clone() for n, p in models[0].named_parameters()}
        errors = [{n: torch.zeros_like(p) for n, p in common.items()} for _ in models]
        for step in range(1, 8):
            run.step(step)
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                take_step(model, optimizer, step, rank)
                for name, parameter in model.named_parameters():
                    errors[rank][name] = parameter.detach() - common[name]
            for name, shared in common.items():
                mask = blocks_of(run.workers[0], name, shared.numel(), step).view(shared.shape)
                sent = [torch.where(mask, own[name], 0.0) for own in errors]
                shared.add_(torch.stack(sent).mean(0))
                for rank, model in enumerate(models):
                    errors[rank][name] -= sent[rank]
                    model.get_parameter(name).data.copy_(shared + errors[rank][name])
            for ours, model in zip(run.weights(), models, strict=True):
                torch.testing.assert_close(ours, weights(model), rtol=1e-5, atol=1e-6)
        assert not all_equal(run.weights())


def test_blocks_are_sent_in_the_format_of_the_parameters() -> None:
    def half() -> nn.Module:
        return nn.Linear(64, 640, bias=False).to(torch.bfloat16)

    torch.manual_seed(0)
    run = SimulatedRun(BlockCSER, None, "grbs:ratio=0.25", sync_every=2, model=half, broadcast=True)
    with run:
        for _ in range(4):
            for optimizer in run.optimizers:
                next(iter(optimizer.param_groups[0]["params"])).grad = torch.zeros(
                    640, 64, dtype=torch.bfloat16
                )
                optimizer.step()
        stats = run.workers[0].stats()
    assert stats["planned_ratio"] == pytest.approx(8)
    assert stats["ratio"] == pytest.approx(8, rel=2e-3)
    with pytest.raises(ConfigError, match=r"BlockCSER: grbs:ratio=0.1,.*would round parameters"):
        SimulatedRun(BlockCSER, None, "grbs:ratio=0.1,values=bf16", sync_every=4)


def test_blocks_are_averaged_and_other_entries_stay() -> None:
    with SimulatedRun(BlockCSER, None, "grbs:ratio=0.25,block=16", sync_every=1) as run:
        alone = [small_model() for _ in run.models]
        for rank, model in enumerate(alone):
            take_step(model, plain_sgd(model), 0, rank)
        run.step(0)
        ctx = run.workers[0]._errors.lanes["0.weight"].ctx._replace(step=1)
        index = GRBS(ratio=0.25, block=16).select(EFInput(torch.zeros(48 * 40)), ctx)
        averaged = torch.zeros(48 * 40, dtype=torch.bool)
        averaged[index] = True
        own = torch.stack([model[0].weight.detach().view(-1) for model in alone])
        for rank, model in enumerate(run.models):
            now = model[0].weight.detach().view(-1)
            assert torch.equal(now[~averaged], own[rank][~averaged])
            torch.testing.assert_close(now[averaged], own.mean(0)[averaged])


@pytest.mark.parametrize("method", [CSER, BlockCSER])
@pytest.mark.parametrize("updates", ["grbs:ratio=0.02", "grbs:ratio=0.1", None])
def test_ratio_is_as_planned(method: type[CSER], updates: str | None) -> None:
    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(40, 32 * 40, bias=False)

    def zero_gradients(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)

    with SimulatedRun(method, updates, "grbs:ratio=0.25", sync_every=8, model=wide) as run:
        for _ in range(16):
            for optimizer in run.optimizers:
                zero_gradients(optimizer)
                optimizer.step()
        stats = run.workers[0].stats()
    r2 = 0.0 if updates is None else float(updates.partition("=")[2])
    sent = r2 + 0.25 / 8 if method is CSER else r2 * 7 / 8 + 0.25 / 8
    assert stats["planned_ratio"] == pytest.approx(1 / sent, rel=2e-3)
    # Only the non-finite flag, a number in every collective, is added.
    assert stats["ratio"] == pytest.approx(stats["planned_ratio"], rel=2e-3)


def test_training_is_nearly_as_good_as_with_full_updates() -> None:
    def final_loss(*specs: str | None) -> float:
        with SimulatedRun(CSER, *specs, sync_every=8, size=2, optimizer=momentum_sgd) as run:
            return sum(run.train(120)[-10:]) / 10

    dense = final_loss("none", "none")
    assert final_loss("grbs:ratio=0.05,block=16", "grbs:ratio=0.25,block=16") < 1.5 * dense
    assert final_loss(None, "topk:ratio=0.1") < 1.5 * dense


def test_compressors_that_are_no_contractions_are_refused() -> None:
    with pytest.raises(ConfigError, match="qsgd:bits=2 does not go with memory 'psync'"):
        SimulatedRun(CSER, "qsgd:bits=2", "topk:ratio=0.1", sync_every=4)
    with pytest.raises(ConfigError, match="needs a contraction"):
        SimulatedRun(CSER, None, "terngrad", sync_every=4)


def test_blocks_must_be_the_same_on_all_workers() -> None:
    message = "BlockCSER: topk:ratio=0.1 does not choose the same entries on all workers"
    with pytest.raises(ConfigError, match=message):
        SimulatedRun(BlockCSER, None, "topk:ratio=0.1", sync_every=4)
    for spec in ("efsign", "powersgd:rank=1", "topk:ratio=0.1 | sign"):
        with pytest.raises(ConfigError, match="BlockCSER"):
            SimulatedRun(BlockCSER, spec, "grbs:ratio=0.1", sync_every=4)


def test_the_model_holds_what_qsparse_keeps_as_residual() -> None:
    """Without updates the error is part of a worker's model."""
    spec = "topk:ratio=0.1,values=fp32"
    with SimulatedRun(CSER, None, spec, sync_every=1, size=1) as run:
        run.train(5)
    with SimulatedRun(QsparseLocalSGD, spec, sync_every=1, size=1) as other:
        other.train(5)
    # CSER with one worker is plain SGD, whatever it sends.
    model = small_model()
    optimizer = plain_sgd(model)
    for step in range(5):
        take_step(model, optimizer, step, 0)
    torch.testing.assert_close(run.weights()[0], weights(model), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(other.weights()[0], weights(model), rtol=1e-5, atol=1e-6)
