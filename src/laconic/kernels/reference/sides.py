"""Signs, one bit each, with a mean for each side of zero, bucket by bucket."""

import torch
from torch import Tensor

from laconic.kernels.reference.bits import pack_bits, unpack_bits


def sides_pack(x: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    """A set bit for every negative entry; for each bucket the mean of those, and of all others."""
    buckets = -(-x.numel() // bucket)
    rows = x.new_zeros(buckets * bucket)
    rows[: x.numel()] = x
    rows = rows.view(buckets, bucket)
    below = (rows < 0).sum(dim=1)
    above = bucket - below
    # What fills up the last bucket is no entry.
    above[-1:] -= rows.numel() - x.numel()
    low = _mean(rows.clamp(max=0).sum(dim=1, dtype=torch.float64), below)
    high = _mean(rows.clamp(min=0).sum(dim=1, dtype=torch.float64), above)
    return pack_bits(x < 0, 1), low, high


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """The sum over the count, as float32; a sum over nothing as it is: zero, or NaN."""
    return (total / count.clamp(min=1)).to(torch.float32)


def sides_pack_sum(
    x: Tensor, residual: Tensor, decay: float, left: Tensor, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`sides_pack` of x + decay * residual; `left` (maybe the residual) holds what is unsaid."""
    total = torch.add(x, residual, alpha=decay, out=left)
    bits, low, high = sides_pack(total, bucket)
    sides_add(left, bits.unsqueeze(0), low.unsqueeze(0), high.unsqueeze(0), -1.0, bucket)
    return bits, low, high


def sides_add(
    out: Tensor, bits: Tensor, low: Tensor, high: Tensor, weight: float, bucket: int
) -> None:
    """Adds `weight` times low where a row's bit is set, else high, row by row in order.

    The rows may lie anywhere in memory, each without gaps.
    """
    numel = out.numel()
    for row, one, other in zip(bits, low * weight, high * weight, strict=True):
        negative = unpack_bits(row, 1, numel).to(torch.bool)
        below, above = (side.repeat_interleave(bucket)[:numel] for side in (one, other))
        out.add_(torch.where(negative, below, above))
