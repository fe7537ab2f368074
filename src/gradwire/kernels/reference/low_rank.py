"""Products of a matrix with thin factors, and orthonormalization of their columns."""

import torch
from torch import Tensor


def factor(m: Tensor, base: Tensor, transposed: bool) -> Tensor:
    """Returns m @ base, or mᵀ @ base if `transposed`."""
    return (m.T if transposed else m) @ base


def factor_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, base: Tensor, transposed: bool
) -> Tensor:
    """Computes `factor` of x + decay * residual and writes that sum to `residual_out`.

    `residual_out` may be the residual.
    """
    return factor(torch.add(x, residual, alpha=decay, out=residual_out), base, transposed)


def subtract_low_rank(m: Tensor, p: Tensor, q: Tensor) -> None:
    """Subtracts p @ qᵀ from `m`, in place."""
    m.addmm_(p, q.T, alpha=-1)


def outer(out: Tensor, p: Tensor, q: Tensor) -> None:
    """Writes p @ qᵀ to `out`."""
    torch.mm(p, q.T, out=out)


def orthonormal(p: Tensor) -> Tensor:
    """Orthonormalizes the columns of `p` (Gram-Schmidt, each projection twice for accuracy).

    A column that depends on those before it, or is zero, or not finite, becomes zero. Norms are
    float64: squares of large or small gradients leave the range of float32.
    """
    done: list[Tensor] = []
    for column in p.unbind(1):
        size = column.norm(dtype=torch.float64)
        rest = column
        for _ in range(2):
            for base in done:
                rest = rest - base * (base @ rest)
        remaining = rest.norm(dtype=torch.float64)
        unit = (rest / remaining).to(p.dtype)
        done.append(torch.where(remaining > 1e-5 * size, unit, 0.0))
    return torch.stack(done, dim=1) if done else p
