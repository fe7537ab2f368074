"""Quantization to codes of a few bits, bucket by bucket.

Every bucket has a scale, and every code stands for a number from -1 to 1; the decoded value is
that number times the scale. Products, quotients and roundings are float32, in the order written
here, so that all backends write the same codes.
"""

import torch
from torch import Tensor

from gradwire.kernels.reference.packing import pack_bits, unpack_bits
from gradwire.kernels.reference.random import random_bits, uniform
from gradwire.kernels.specs import RoundingSpec
from gradwire.types import Key

DECADES = 7
"""Of the tree: one for each bit beside the sign."""
LARGEST_POWER, BAD = 126, 127
"""The codes of the scale itself, and of what is not finite, among powers of two."""
SMALLEST_SCALE = -24
"""The exponent of the smallest scale of powers: from there the codes reach down to 2^-149."""


def round_pack(x: Tensor, rule: RoundingSpec, key: Key) -> tuple[Tensor, Tensor]:
    """Codes of `rule.width` bits, packed, and one float32 scale a bucket.

    An entry that is not finite makes its bucket's scale so (of powers: its own code).
    """
    rows = _rows(x, rule.bucket)
    if rule.kind == "power":
        codes, scales = _powers(rows, key)
    else:
        scales = _scales(rows, rule)
        codes = _codes(rows, _scaled(rows.abs(), scales, rule.top), rule, key)
        scales = scales / torch.full_like(scales, rule.over)
    return pack_bits(codes.view(-1)[: x.numel()].long(), rule.width), scales


def round_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, rule: RoundingSpec, key: Key
) -> tuple[Tensor, Tensor]:
    """`round_pack` of x + decay * residual; `residual_out` (maybe the residual) holds what is unsaid."""
    total = torch.add(x, residual, alpha=decay, out=residual_out)
    codes, scales = round_pack(total, rule, key)
    round_add(residual_out, codes.unsqueeze(0), scales.unsqueeze(0), -1.0, rule)
    return codes, scales


def round_add(
    out: Tensor, codes: Tensor, scales: Tensor, weight: float, rule: RoundingSpec
) -> None:
    """Adds `weight` times what each row of codes and scales says, in order.

    The rows may lie anywhere in memory, each without gaps.
    """
    table = meaning(rule, out.device)
    for row, scale in zip(codes, scales * weight, strict=True):
        code = unpack_bits(row, rule.width, out.numel())
        out.add_(table[code] * scale.repeat_interleave(rule.bucket)[: out.numel()])


def meaning(rule: RoundingSpec, device: torch.device) -> Tensor:
    """The number from -1 to 1 (of powers: or infinity) that each code stands for, in float32."""
    if rule.kind in ("chance", "nearest"):
        code = torch.arange(1 << rule.width, device=device)
        return (code - rule.levels) * torch.tensor(1 / rule.levels, device=device)
    code = torch.arange(128, device=device)
    if rule.kind == "tree":
        positive = tree(device).to(torch.float32)
    elif rule.kind == "power":
        positive = torch.ldexp(torch.ones(128, device=device), code - LARGEST_POWER)
        positive[0], positive[BAD] = 0.0, torch.inf
    else:
        positive = code.to(torch.uint8).view(_float8(rule)).to(torch.float32) / rule.top
    return torch.cat([positive, -positive])


def tree(device: torch.device) -> Tensor:
    """The 128 levels of the tree, ascending from 0 to 1, in float64.

    The zero bits before the first one count the decades below 1; the k bits after it divide that
    decade into 2^k even steps, and a level is the upper end of its step.
    """
    levels = [torch.zeros(1, dtype=torch.float64, device=device)]
    for k in range(DECADES):
        step = torch.arange(1, (1 << k) + 1, dtype=torch.float64, device=device)
        levels.append((step * 0.9 / (1 << k) + 0.1) * 10.0 ** (k + 1 - DECADES))
    return torch.cat(levels)


def _float8(rule: RoundingSpec) -> torch.dtype:
    return torch.float8_e4m3fn if rule.kind == "e4m3" else torch.float8_e5m2


def _rows(x: Tensor, bucket: int) -> Tensor:
    """`x` as [buckets, bucket], filled up with zeros."""
    buckets = -(-x.numel() // bucket)
    rows = x.new_zeros(buckets * bucket)
    rows[: x.numel()] = x
    return rows.view(buckets, bucket)


def _scales(rows: Tensor, rule: RoundingSpec) -> Tensor:
    if rule.scale == "l2":
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        return norms.to(rows.dtype)
    largest = rows.abs().amax(dim=1)
    return largest.to(torch.bfloat16).to(rows.dtype) if rule.scale == "max16" else largest


def _scaled(size: Tensor, scales: Tensor, top: float) -> Tensor:
    """`size` in units of scale/top, from 0 to `top`; what is no number is 0."""
    # Reciprocals of very small and very large numbers leave the range of float32.
    lift = torch.where(scales < 2.0**-64, 2.0**64, torch.where(scales > 2.0**64, 2.0**-64, 1.0))
    # A division of tensors, since torch takes a number over a tensor as number times reciprocal.
    step = torch.where(scales > 0, torch.full_like(scales, top) / (scales * lift), 0)
    exact = size * lift.unsqueeze(1) * step.unsqueeze(1)
    return torch.where(exact > 0, exact, 0.0).clamp_(max=top)


def _codes(rows: Tensor, exact: Tensor, rule: RoundingSpec, key: Key) -> Tensor:
    if rule.kind == "chance":
        down = exact.floor()
        chance = uniform(key, rows.numel(), rows.device).view(rows.shape)
        level = down + (chance < exact - down).to(rows.dtype)
        return torch.where(rows < 0, rule.levels - level, rule.levels + level)
    if rule.kind == "nearest":
        level = exact.round()
        return torch.where(rows < 0, rule.levels - level, rule.levels + level)
    code = _leaf(exact) if rule.kind == "tree" else exact.to(_float8(rule)).view(torch.uint8)
    return code.long() + 128 * (rows < 0)


def _leaf(exact: Tensor) -> Tensor:
    """The code of the level of the tree that is nearest."""
    decade = torch.zeros_like(exact, dtype=torch.long)
    for k in range(1, DECADES):
        decade += exact > 10.0 ** (k - DECADES)
    steps = 1 << decade
    # A ninth of the steps lies below the decade; below the lowest there is nothing.
    below = torch.where(decade > 0, steps, 0).to(exact.dtype) * torch.tensor(1 / 9)
    return steps - 1 + (exact * slopes(exact.device)[decade] - below).round().long()


def slopes(device: torch.device) -> Tensor:
    """Steps per unit in each decade of the tree; the lowest decade begins at zero."""
    k = torch.arange(DECADES, dtype=torch.float64, device=device)
    slope = 2**k / 0.9 * 10 ** (DECADES - 1 - k)
    slope[0] = 10.0 ** (DECADES - 1)
    return slope.to(torch.float32)


def _powers(rows: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    size = rows.abs()
    # The smallest numbers have no exponent of their own.
    small = size < 2.0**-64
    bits = torch.where(small, size * 2.0**64, size).view(torch.int32).long()
    bad = bits >= 0x7F800000
    # 23 random bits beside the 23 of the fraction: the carry comes with its very chance.
    noise = random_bits(key, rows.numel(), rows.device).view(rows.shape) & 0x7FFFFF
    power = ((bits + noise) >> 23).clamp(max=254) - 64 * small.long()
    zero = 127 + SMALLEST_SCALE - LARGEST_POWER
    largest = power.masked_fill(bad, zero).amax(dim=1)
    base = (largest - LARGEST_POWER).clamp(min=zero)
    code = (power - base.unsqueeze(1)).clamp(min=0).masked_fill(bad, BAD) + 128 * (rows < 0)
    return code, ((base + LARGEST_POWER) << 23).to(torch.int32).view(torch.float32)
