"""Thin factors of a matrix against their meaning, in float64."""

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
each_side = pytest.mark.parametrize("turned", [False, True], ids=["along", "across"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(one: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(one.double(), exact, rtol=1e-4, atol=1e-4)


@each_backend
@each_shape
@each_rank
@each_side
def test_products(backend: ModuleType, shape: tuple[int, int], rank: int, turned: bool) -> None:
    m, residual, residual_out = normal(*shape), normal(*shape, seed=1), torch.full(shape, torch.nan)
    base = normal(shape[0] if turned else shape[1], rank, seed=2)
    ctx = (lambda t: t.T) if turned else (lambda t: t)
    close(backend.factor(m, base, turned), ctx(m).double() @ base.double())
    total = m.double() + 0.5 * residual.double()
    close(
        backend.factor_sum(m, residual, 0.5, residual_out, base, turned), ctx(total) @ base.double()
    )
    close(residual_out, total)
    backend.factor_sum(m, residual, 0.5, residual, base, turned)
    assert torch.equal(residual, residual_out)


@each_backend
@each_shape
@each_rank
def test_what_two_factors_say(backend: ModuleType, shape: tuple[int, int], rank: int) -> None:
    p, q = normal(shape[0], rank), normal(shape[1], rank, seed=1)
    out = torch.full(shape, torch.nan)
    backend.outer(out, p, q)
    said = p.double() @ q.double().T
    close(out, said)
    m = normal(*shape, seed=2)
    rest = m.clone()
    backend.lessen(rest, p, q)
    close(rest, m.double() - said)


@each_backend
def test_numbers_that_are_none_show(backend: ModuleType) -> None:
    m = normal(9, 7)
    m[4, 3] = torch.nan
    along = backend.factor(m, normal(7, 4), False)
    assert along.isnan().any(dim=1).tolist() == [row == 4 for row in range(9)]
    across = backend.factor(m, normal(9, 4), True)
    assert across.isnan().any(dim=1).tolist() == [column == 3 for column in range(7)]


@each_backend
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_nothing(backend: ModuleType, shape: tuple[int, int], rank: int) -> None:
    m = torch.zeros(shape)
    p, q = torch.zeros(shape[0], rank), torch.zeros(shape[1], rank)
    assert backend.factor(m, q, False).shape == p.shape
    assert backend.factor(m, p, True).shape == q.shape
    backend.lessen(m, p, q)
    backend.outer(m, p, q)
    assert backend.orthonormal(p).shape == p.shape
