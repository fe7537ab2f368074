"""Products of a matrix with thin factors, and orthonormalization of their columns."""

import torch
from torch import Tensor


def factor(m: Tensor, base: Tensor, turned: bool) -> Tensor:
    """m @ base, or mᵀ @ base where `turned`."""
    return (m.T if turned else m) @ base


def factor_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, base: Tensor, turned: bool
) -> Tensor:
    """`factor` of x + decay * residual, which is then in `residual_out` (maybe the residual)."""
    return factor(torch.add(x, residual, alpha=decay, out=residual_out), base, turned)


def lessen(m: Tensor, p: Tensor, q: Tensor) -> None:
    """Takes p @ qᵀ away from `m`."""
    m.addmm_(p, q.T, alpha=-1)


def outer(out: Tensor, p: Tensor, q: Tensor) -> None:
    """Writes p @ qᵀ to `out`."""
    torch.mm(p, q.T, out=out)


def orthonormal(p: Tensor) -> Tensor:
    """The columns of p made orthonormal (Gram-Schmidt, each projection done twice for accuracy).

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
        residual_out = rest.norm(dtype=torch.float64)
        unit = (rest / residual_out).to(p.dtype)
        done.append(torch.where(residual_out > 1e-5 * size, unit, 0.0))
    return torch.stack(done, dim=1) if done else p
