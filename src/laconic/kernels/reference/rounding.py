"""Stochastic rounding to a few levels around zero, bucket by bucket."""

import torch
from torch import Tensor

from laconic.kernels.reference.bits import pack_bits, unpack_bits
from laconic.kernels.reference.random import uniform


def round_pack(x: Tensor, width: int, bucket: int, l2: bool, key: int) -> tuple[Tensor, Tensor]:
    """Codes of `width` bits and one scale a bucket.

    With s = 2^(width-1) - 1, an entry is rounded up or down to a multiple of scale/s so that its
    expectation is exact; the code is s plus the signed multiple. An entry that is not finite makes
    its bucket's scale so.
    """
    levels = (1 << (width - 1)) - 1
    buckets = -(-x.numel() // bucket)
    rows = x.new_zeros(buckets * bucket)
    rows[: x.numel()] = x
    rows = rows.view(buckets, bucket)
    scales = rows.norm(dim=1, dtype=torch.float64).to(x.dtype) if l2 else rows.abs().amax(dim=1)
    # A division of tensors, since torch takes a number over a tensor as number times reciprocal.
    step = torch.where(scales > 0, torch.full_like(scales, levels) / scales, 0)
    exact = rows.abs() * step.unsqueeze(1)
    down = exact.floor()
    chance = uniform(key, buckets * bucket, x.device).view(buckets, bucket)
    level = torch.nan_to_num(down + (chance < exact - down).to(x.dtype), nan=0.0).clamp_(0, levels)
    codes = torch.where(rows < 0, levels - level, levels + level)
    return pack_bits(codes.view(-1)[: x.numel()].long(), width), scales


def round_pack_sum(
    x: Tensor,
    residual: Tensor,
    decay: float,
    left: Tensor,
    width: int,
    bucket: int,
    l2: bool,
    key: int,
) -> tuple[Tensor, Tensor]:
    """`round_pack` of x + decay * residual; `left` (maybe the residual) holds what is unsaid."""
    total = torch.add(x, residual, alpha=decay, out=left)
    codes, scales = round_pack(total, width, bucket, l2, key)
    round_add(left, codes.unsqueeze(0), -scales.unsqueeze(0), width, bucket)
    return codes, scales


def round_add(out: Tensor, codes: Tensor, scales: Tensor, width: int, bucket: int) -> None:
    """Adds what each row of codes and scales says, in order."""
    levels = (1 << (width - 1)) - 1
    for row, scale in zip(codes, scales, strict=True):
        level = unpack_bits(row, width, out.numel()).to(out.dtype) - levels
        unit = (scale / levels).repeat_interleave(bucket)[: out.numel()]
        out.add_(level * unit)
