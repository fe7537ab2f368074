"""Signs in one bit each: with two means per bucket, with one mean magnitude, or as votes.

Votes replace the sign of a zero by a random bit.
"""

import torch
from torch import Tensor

from gradwire.kernels.reference.packing import pack_bits, unpack_bits
from gradwire.kernels.reference.random import random_bits
from gradwire.types import Key


def sign_means_pack(x: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the packed signs, and per bucket the mean of negative and that of other entries.

    The bit of a negative entry is set.
    """
    buckets = -(-x.numel() // bucket)
    rows = x.new_zeros(buckets * bucket)
    rows[: x.numel()] = x
    rows = rows.view(buckets, bucket)
    below = (rows < 0).sum(dim=1)
    above = bucket - below
    # Padding of the last bucket does not count.
    above[-1:] -= rows.numel() - x.numel()
    low = _mean(rows.clamp(max=0).sum(dim=1, dtype=torch.float64), below)
    high = _mean(rows.clamp(min=0).sum(dim=1, dtype=torch.float64), above)
    return pack_bits(x < 0, 1), low, high


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """Returns total / count as float32; without entries the total itself: zero, or NaN."""
    return (total / count.clamp(min=1)).to(torch.float32)


def sign_means_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `sign_means_pack` of x + decay * residual; `residual_out` then holds the error.

    `residual_out` may be the residual.
    """
    total = torch.add(x, residual, alpha=decay, out=residual_out)
    bits, low, high = sign_means_pack(total, bucket)
    sign_means_add(
        residual_out, bits.unsqueeze(0), low.unsqueeze(0), high.unsqueeze(0), -1.0, bucket
    )
    return bits, low, high


def sign_means_add(
    out: Tensor, bits: Tensor, low: Tensor, high: Tensor, weight: float, bucket: int
) -> None:
    """Adds `weight` times `low` where a row's bit is set, else `high`, row by row in order.

    Each row is contiguous; the rows may be anywhere in memory.
    """
    numel = out.numel()
    for row, one, other in zip(bits, low * weight, high * weight, strict=True):
        negative = unpack_bits(row, 1, numel).to(torch.bool)
        below, above = (means.repeat_interleave(bucket)[:numel] for means in (one, other))
        out.add_(torch.where(negative, below, above))


def sign_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns packed signs (a set bit: negative), and the mean of |x| as a one-element tensor."""
    # In float64, since sums of the largest float32 numbers overflow.
    scale = x.abs().mean(dtype=torch.float64).to(x.dtype) if x.numel() else x.new_zeros(())
    return pack_bits(x < 0, 1), scale.view(1)


def sign_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes `sign_pack` of x + decay * residual; `residual_out` then holds the error.

    `residual_out` may be the residual.
    """
    total = torch.add(x, residual, alpha=decay, out=residual_out)
    bits, scale = sign_pack(total)
    sign_add(residual_out, bits.unsqueeze(0), scale.unsqueeze(0), -1.0)
    return bits, scale


def sign_add(out: Tensor, bits: Tensor, scales: Tensor, weight: float) -> None:
    """Adds `weight * scales[i]` (one per row) with the signs in row `bits[i]`."""
    sign_means_add(out, bits, -scales, scales, weight, max(1, out.numel()))


def sign_votes_pack(x: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    """Returns the packed signs, and 1; or 0 if `x` is all zeros, NaN if any entry is non-finite.

    A zero takes its bit from the random words instead: bit i % 32 of word i / 32.
    """
    nbytes = -(-x.numel() // 8)
    words = random_bits(key, -(-nbytes // 4), x.device)
    noise = words.to(torch.int32).view(torch.uint8)[:nbytes]
    return pack_bits(x < 0, 1) | (pack_bits(x == 0, 1) & noise), _vote_weight(x)


def _vote_weight(x: Tensor) -> Tensor:
    if not x.numel():
        return x.new_zeros(1)
    peak = x.abs().amax().view(1)
    return torch.where(peak.isfinite(), peak.sign(), torch.nan)
