"""A tensor as a matrix, and its thin factors: what the low-rank methods share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.kernels.validation import check_given
from gradwire.types import Given, Turn, mix


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor as a matrix: its first dimension by all others."""
    rows = shape[0] if len(shape) else 1
    return rows, torch.Size(shape).numel() // rows if rows else 0


def starts(sides: Sequence[int], rank: int, turn: Turn, device: torch.device) -> list[Tensor]:
    """A random factor for each side: the same on every rank, another for every parameter."""
    generator = torch.Generator().manual_seed(mix(turn.seed, turn.lane) >> 1)
    few = min(rank, *matrix_shape(turn.shape))
    return [torch.randn(side, few, generator=generator).to(device) for side in sides]


def take_in(given: Given, turn: Turn, base: Tensor, turned: bool = False) -> tuple[Tensor, Tensor]:
    """What is given as a matrix M, inside `left` where there is one, and M or Mᵀ times `base`."""
    check_given(given)
    shape = matrix_shape(turn.shape)
    if given.residual is None or given.left is None:
        m = given.total().view(shape)
        return m, kernels.at(m).factor(m, base, turned)
    x, residual, left = (t.view(shape) for t in (given.x, given.residual, given.left))
    return left, kernels.at(x).factor_sum(x, residual, given.decay, left, base, turned)


def give_out(given: Given, turn: Turn, p: Tensor, q: Tensor) -> Tensor:
    """P Qᵀ in the memory of the gradient, flat."""
    out = given.x.view(matrix_shape(turn.shape))
    kernels.at(out).outer(out, p, q)
    return given.x


def renewed(factor: Tensor, said: Tensor) -> Tensor:
    """What was said last, column by column.

    A column that is zero, or no number, would stay so for ever: there the factor is kept.
    """
    size = said.norm(dim=0, dtype=torch.float64)
    # Zero, infinity and NaN are what is not one times itself.
    return torch.where(size / size == 1, said, factor)
