"""Compares the Triton kernels of low-rank factors, interpreted on the CPU, with the reference."""

import os
from functools import partial
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch

from gradwire.kernels import cuda, reference
from gradwire.kernels.cuda import low_rank

# Makes `torch.empty` fill with NaN or the largest integer, for the whole process.
torch.use_deterministic_algorithms(True)

SHAPES = ((1, 1), (7, 5), (1, 1030), (33, 1025))
COLUMNS = ((1, 1), (300, 1), (3, 3), (500, 4), (700, 5), (140, 16), (300, 17))


def pair(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
    return x, residual


def compare_factors(rows: int, cols: int, rank: int, transposed: bool) -> None:
    x, residual = (t.view(rows, cols) for t in pair(rows * cols))
    base = pair(rank * (rows if transposed else cols))[0].view(-1, rank)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(cuda.factor(x, base, transposed), reference.factor(x, base, transposed))
    residual_out, expected = torch.full((2, rows, cols), float("nan"))
    product = cuda.factor_sum(x, residual, 0.5, residual_out, base, transposed)
    close(product, reference.factor_sum(x, residual, 0.5, expected, base, transposed))
    torch.testing.assert_close(residual_out, expected)
    p, q = (base, product) if transposed else (product, base)
    cuda.subtract_low_rank(residual_out, p, q)
    reference.subtract_low_rank(expected, p, q)
    close(residual_out, expected, rtol=1e-3, atol=1e-3)
    cuda.outer(residual_out, p, q)
    reference.outer(expected, p, q)
    close(residual_out, expected)


def compare_orthonormal(rows: int, rank: int) -> None:
    p = pair(rows * rank)[0].view(rows, rank)
    unit = cuda.orthonormal(p)
    torch.testing.assert_close(unit, reference.orthonormal(p), rtol=1e-4, atol=1e-4)


def check_odd_columns() -> None:
    """Dependent, zero, huge, tiny and non-finite columns are handled like in the reference."""
    a, b = pair(300)
    nan, inf = a.clone(), b.clone()
    nan[5], inf[7] = float("nan"), float("inf")
    columns = [nan, a * 1e25, a + 0.1 * b, 2 * a, inf, 0 * a, b * 1e-25, a - b, 1e20 * b]
    p = torch.stack(columns, dim=1)
    unit = cuda.orthonormal(p)
    norms = torch.tensor([0.0, 1, 1, 0, 0, 0, 0, 0, 0])
    torch.testing.assert_close(unit.T @ unit, torch.diag(norms), rtol=0, atol=1e-5)
    torch.testing.assert_close(reference.orthonormal(p).norm(dim=0), norms)


def check_nearly_dependent_chain() -> None:
    """Each column nearly depends on those before: a single pass leaves norms off by a tenth."""
    e = torch.eye(50)[:, :4].double()
    columns = [e[:, 0], e[:, 0] + 2e-4 * e[:, 1], e[:, 0] + e[:, 1] + 2e-4 * e[:, 2], e[:, 3]]
    unit = cuda.orthonormal(torch.stack(columns, dim=1).float())
    torch.testing.assert_close(unit.T @ unit, torch.eye(4), rtol=0, atol=1e-5)


def compare() -> dict[str, int]:
    """Returns the number of comparisons of each kind."""
    compared = {"factors": 0, "orthonormal": 0}
    for rows, cols in SHAPES:
        for rank in (1, 3):
            for transposed in (False, True):
                compare_factors(rows, cols, rank, transposed)
                compared["factors"] += 1
    compare_factors(7, 5, 17, False)
    with patch.multiple(low_rank, LARGE=0, PROGRAMS=4):
        compare_factors(131, 1070, 4, False)
        compare_factors(131, 1070, 3, True)
    for rows, rank in COLUMNS:
        compare_orthonormal(rows, rank)
        compared["orthonormal"] += 1
    check_odd_columns()
    check_nearly_dependent_chain()
    return compared
