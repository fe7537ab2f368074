"""Signs, one bit each, with the mean magnitude."""

import torch
from torch import Tensor

from laconic.kernels.reference.bits import pack_bits, unpack_bits


def sign_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """A set bit for every negative entry, and the mean of |x| as a tensor of one element."""
    scale = x.abs().mean().view(1) if x.numel() else x.new_zeros(1)
    return pack_bits(x < 0, 1), scale


def sign_pack_sum(x: Tensor, residual: Tensor, decay: float, left: Tensor) -> tuple[Tensor, Tensor]:
    """`sign_pack` of x + decay * residual; `left` (maybe the residual) holds what is unsaid."""
    total = torch.add(x, residual, alpha=decay, out=left)
    bits, scale = sign_pack(total)
    sign_add(left, bits.unsqueeze(0), -scale)
    return bits, scale


def sign_add(out: Tensor, bits: Tensor, scales: Tensor) -> None:
    """Adds scales[i] * (+1 or -1) for every row `bits[i]`, in order."""
    for row, scale in zip(bits, scales, strict=True):
        signs = 1 - 2 * unpack_bits(row, 1, out.numel())
        out.add_(signs.to(out.dtype) * scale)
