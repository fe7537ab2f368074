"""A tensor as a matrix, and orthonormal columns: what the low-rank methods share."""

from collections.abc import Sequence

import torch
from torch import Tensor


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor as a matrix: its first dimension by all others."""
    rows = shape[0] if len(shape) else 1
    return rows, torch.Size(shape).numel() // rows if rows else 0


def orthonormal(p: Tensor) -> Tensor:
    """The columns of p made orthonormal (Gram-Schmidt, each projection done twice for accuracy).

    A column that depends on those before it, or is zero, becomes zero. Norms are float64: squares
    of large or small gradients leave the range of float32.
    """
    done: list[Tensor] = []
    for column in p.unbind(1):
        size = column.norm(dtype=torch.float64)
        rest = column
        for _ in range(2):
            for base in done:
                rest = rest - base * (base @ rest)
        left = rest.norm(dtype=torch.float64)
        unit = (rest / left).to(p.dtype)
        done.append(torch.where(left > 1e-5 * size, unit, 0.0))
    return torch.stack(done, dim=1) if done else p
