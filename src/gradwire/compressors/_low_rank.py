"""Shared parts of the low-rank methods: a tensor as a matrix, and its factors of a few columns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.kernels.validation import check_ef_input
from gradwire.types import EFInput, EncodeContext, mix


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns rows and columns of a tensor as a matrix: its first dimension by all others."""
    rows = shape[0] if len(shape) else 1
    return rows, torch.Size(shape).numel() // rows if rows else 0


def initial_factors(
    sides: Sequence[int], rank: int, ctx: EncodeContext, device: torch.device
) -> list[Tensor]:
    """Returns a random factor per side: equal on all ranks, different for every parameter."""
    generator = torch.Generator().manual_seed(mix(ctx.seed, ctx.lane_id) >> 1)
    columns = min(rank, *matrix_shape(ctx.shape))
    return [torch.randn(side, columns, generator=generator).to(device) for side in sides]


def load_and_project(
    ef: EFInput, ctx: EncodeContext, base: Tensor, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the input as a matrix M, and M or Mᵀ times `base`.

    M is in the memory of `residual_out` where there is one.
    """
    check_ef_input(ef)
    shape = matrix_shape(ctx.shape)
    if ef.residual is None or ef.residual_out is None:
        m = ef.total().view(shape)
        return m, kernels.on(m.device).factor(m, base, transposed)
    x, residual, residual_out = (t.view(shape) for t in (ef.grad, ef.residual, ef.residual_out))
    return residual_out, kernels.on(x.device).factor_sum(
        x, residual, ef.decay, residual_out, base, transposed
    )


def write_product(ef: EFInput, ctx: EncodeContext, p: Tensor, q: Tensor) -> Tensor:
    """Writes P Qᵀ into the gradient and returns it, flat."""
    out = ef.grad.view(matrix_shape(ctx.shape))
    kernels.on(out.device).outer(out, p, q)
    return ef.grad


def update_base(base: Tensor, sent: Tensor) -> Tensor:
    """Returns the factor for the next step: the columns of `sent`, made orthonormal.

    So it has no scale, and products with it stay in the range of the gradient. A column of `sent`
    that is zero, not finite, or depends on those before it would be zero for ever: there the column
    of `base` stays.
    """
    unit = kernels.on(sent.device).orthonormal(sent)
    return torch.where(unit.any(dim=0), unit, base)


def update_factor(factor: Tensor, sent: Tensor) -> Tensor:
    """Returns the factor for the next step: the columns of `sent`, or of `factor` where unusable.

    A column that is zero or not finite would stay so for ever.
    """
    norm = sent.norm(dim=0, dtype=torch.float64)
    # The quotient is NaN for zero, infinity and NaN.
    return torch.where(norm / norm == 1, sent, factor)
