"""Low-rank factors on the GPU: equal to the reference, deterministic, without synchronisation."""

import pytest
import torch
from torch import Tensor

from gradwire.base import MultiRound
from gradwire.bench.microbench.ef_step import ef_step, replay_of
from gradwire.spec import parse
from gradwire.types import EFInput, EncodeContext

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    pytest.mark.usefixtures("poisoned_memory"),
]

SHAPES = [(1, 1), (7, 5), (1, 5000), (5000, 1), (1000, 1003), (64, 40_000)]
SPECS = ["powersgd:rank=1", "powersgd:rank=4", "acpsgd:rank=1", "acpsgd:rank=4"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(gpu: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(gpu.cpu().double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [1, 4, 7, 16, 17])
@pytest.mark.parametrize("transposed", [False, True])
def test_products(shape: tuple[int, int], rank: int, transposed: bool) -> None:
    from gradwire.kernels import cuda

    x, residual, residual_out = normal(*shape), normal(*shape, seed=1), torch.full(shape, torch.nan)
    base = normal(shape[0] if transposed else shape[1], rank, seed=2)
    on_gpu = [t.cuda() for t in (x, residual, residual_out, base)]
    product = cuda.factor_sum(on_gpu[0], on_gpu[1], 0.5, on_gpu[2], on_gpu[3], transposed)
    total = x.double() + 0.5 * residual.double()
    exact = (total.T if transposed else total) @ base.double()
    close(product, exact)
    close(on_gpu[2], total)
    close(cuda.factor(on_gpu[2], on_gpu[3], transposed), exact)
    p, q = (on_gpu[3], product) if transposed else (product, on_gpu[3])
    outer_product = p.cpu().double() @ q.cpu().double().T
    cuda.subtract_low_rank(on_gpu[2], p, q)
    torch.testing.assert_close(
        on_gpu[2].cpu().double(), total - outer_product, rtol=1e-4, atol=1e-2
    )
    cuda.outer(on_gpu[2], p, q)
    torch.testing.assert_close(on_gpu[2].cpu().double(), outer_product, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("rows", [20, 1000, 100_003])
@pytest.mark.parametrize("rank", [1, 4, 7, 16, 17])
def test_orthonormal_columns(rows: int, rank: int) -> None:
    from gradwire.kernels import cuda, reference

    p = normal(rows, rank)
    unit = cuda.orthonormal(p.cuda()).cpu()
    gram = unit.double().T @ unit.double()
    torch.testing.assert_close(gram, torch.eye(rank).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(unit, reference.orthonormal(p), rtol=1e-3, atol=1e-4)


def test_dependent_columns_become_zero() -> None:
    from gradwire.kernels import cuda

    a, b, zero = normal(500), normal(500, seed=1), torch.zeros(500)
    bad = torch.where(torch.arange(500) == 3, torch.nan, a)
    p = torch.stack([bad, a * 1e20, 2 * a, zero, b * 1e-20, a - b, bad * torch.inf], dim=1)
    unit = cuda.orthonormal(p.cuda()).cpu()
    kept = torch.tensor([0.0, 1, 0, 0, 1, 0, 0])
    torch.testing.assert_close(unit.T @ unit, torch.diag(kept), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("spec", SPECS)
def test_a_step_is_deterministic_and_never_synchronizes(spec: str) -> None:
    ctx = EncodeContext((700, 900))
    x, residual = normal(700 * 900).cuda(), normal(700 * 900, seed=1).cuda()
    codec = parse(spec)
    assert isinstance(codec, MultiRound)
    states = [codec.state(ctx, x.device) for _ in range(3)]
    outcomes = []
    for state in states:
        ef = EFInput(x.clone(), residual, torch.empty_like(x))
        rounds = codec.rounds(ef, state, ctx)
        # The first run compiles.
        torch.cuda.set_sync_debug_mode("error" if outcomes else "default")
        request = next(rounds)
        try:
            while True:
                request = rounds.send([request.parts])
        except StopIteration as end:
            outcomes.append((end.value, ef.residual_out, *state.values()))
        torch.cuda.set_sync_debug_mode("default")
    assert len(outcomes) == 3
    for outcome in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcome, outcomes[0], strict=True))


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_can_be_captured(spec: str) -> None:
    x = normal(700, 900).cuda()
    replay_of(ef_step(parse(spec), x, EncodeContext((700, 900))))()
    torch.cuda.synchronize()
