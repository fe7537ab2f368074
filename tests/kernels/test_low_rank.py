"""Products with low-rank factors equal those in float64."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference

SHAPES = [(1, 1), (7, 5), (1, 1030), (1030, 1), (33, 1025), (2050, 3)]
RANKS = [1, 2, 3, 4, 8, 9, 17]

each_backend = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_rank = pytest.mark.parametrize("rank", RANKS)
each_side = pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(one: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(one.double(), exact, rtol=1e-4, atol=1e-4)


@each_backend
@each_shape
@each_rank
@each_side
def test_products(backend: ModuleType, shape: tuple[int, int], rank: int, transposed: bool) -> None:
    m, residual, residual_out = normal(*shape), normal(*shape, seed=1), torch.full(shape, torch.nan)
    base = normal(shape[0] if transposed else shape[1], rank, seed=2)
    orient = (lambda t: t.T) if transposed else (lambda t: t)
    close(backend.factor(m, base, transposed), orient(m).double() @ base.double())
    total = m.double() + 0.5 * residual.double()
    close(
        backend.factor_sum(m, residual, 0.5, residual_out, base, transposed),
        orient(total) @ base.double(),
    )
    close(residual_out, total)
    backend.factor_sum(m, residual, 0.5, residual, base, transposed)
    assert torch.equal(residual, residual_out)


@each_backend
@each_shape
@each_rank
def test_outer_product(backend: ModuleType, shape: tuple[int, int], rank: int) -> None:
    p, q = normal(shape[0], rank), normal(shape[1], rank, seed=1)
    out = torch.full(shape, torch.nan)
    backend.outer(out, p, q)
    product = p.double() @ q.double().T
    close(out, product)
    m = normal(*shape, seed=2)
    rest = m.clone()
    backend.subtract_low_rank(rest, p, q)
    close(rest, m.double() - product)


@each_backend
def test_nan_propagates(backend: ModuleType) -> None:
    m = normal(9, 7)
    m[4, 3] = torch.nan
    rows = backend.factor(m, normal(7, 4), False)
    assert rows.isnan().any(dim=1).tolist() == [row == 4 for row in range(9)]
    columns = backend.factor(m, normal(9, 4), True)
    assert columns.isnan().any(dim=1).tolist() == [column == 3 for column in range(7)]


@each_backend
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_empty_matrices(backend: ModuleType, shape: tuple[int, int], rank: int) -> None:
    m = torch.zeros(shape)
    p, q = torch.zeros(shape[0], rank), torch.zeros(shape[1], rank)
    assert backend.factor(m, q, False).shape == p.shape
    assert backend.factor(m, p, True).shape == q.shape
    backend.subtract_low_rank(m, p, q)
    backend.outer(m, p, q)
    assert backend.orthonormal(p).shape == p.shape
