"""Signs, one bit each, with the mean magnitude."""

import torch
from torch import Tensor

from laconic.kernels.reference.bits import pack_bits
from laconic.kernels.reference.sides import sides_add


def sign_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """A set bit for every negative entry, and the mean of |x| as a tensor of one element."""
    scale = x.abs().mean().view(1) if x.numel() else x.new_zeros(1)
    return pack_bits(x < 0, 1), scale


def sign_pack_sum(x: Tensor, residual: Tensor, decay: float, left: Tensor) -> tuple[Tensor, Tensor]:
    """`sign_pack` of x + decay * residual; `left` (maybe the residual) holds what is unsaid."""
    total = torch.add(x, residual, alpha=decay, out=left)
    bits, scale = sign_pack(total)
    sign_add(left, bits.unsqueeze(0), scale.unsqueeze(0), -1.0)
    return bits, scale


def sign_add(out: Tensor, bits: Tensor, scales: Tensor, weight: float) -> None:
    """Adds `weight * scales[i]` (one a row) with the signs that every row `bits[i]` says."""
    sides_add(out, bits, -scales, scales, weight, max(1, out.numel()))
