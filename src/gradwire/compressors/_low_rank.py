"""A tensor as a matrix, and its thin factors: what the low-rank methods share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.kernels.validation import check_given
from gradwire.types import EFInput, EncodeContext, mix


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor as a matrix: its first dimension by all others."""
    rows = shape[0] if len(shape) else 1
    return rows, torch.Size(shape).numel() // rows if rows else 0


def starts(
    sides: Sequence[int], rank: int, ctx: EncodeContext, device: torch.device
) -> list[Tensor]:
    """A random factor for each side: the same on every rank, another for every parameter."""
    generator = torch.Generator().manual_seed(mix(ctx.seed, ctx.lane_id) >> 1)
    few = min(rank, *matrix_shape(ctx.shape))
    return [torch.randn(side, few, generator=generator).to(device) for side in sides]


def take_in(
    ef: EFInput, ctx: EncodeContext, base: Tensor, turned: bool = False
) -> tuple[Tensor, Tensor]:
    """What is given as a matrix M, inside `residual_out` where there is one, and M or Mᵀ times `base`."""
    check_given(ef)
    shape = matrix_shape(ctx.shape)
    if ef.residual is None or ef.residual_out is None:
        m = ef.total().view(shape)
        return m, kernels.at(m).factor(m, base, turned)
    x, residual, residual_out = (t.view(shape) for t in (ef.grad, ef.residual, ef.residual_out))
    return residual_out, kernels.at(x).factor_sum(x, residual, ef.decay, residual_out, base, turned)


def give_out(ef: EFInput, ctx: EncodeContext, p: Tensor, q: Tensor) -> Tensor:
    """P Qᵀ in the memory of the gradient, flat."""
    out = ef.grad.view(matrix_shape(ctx.shape))
    kernels.at(out).outer(out, p, q)
    return ef.grad


def renewed(factor: Tensor, said: Tensor) -> Tensor:
    """What was said last, column by column.

    A column that is zero, or no number, would stay so for ever: there the factor is kept.
    """
    size = said.norm(dim=0, dtype=torch.float64)
    # Zero, infinity and NaN are what is not one times itself.
    return torch.where(size / size == 1, said, factor)
