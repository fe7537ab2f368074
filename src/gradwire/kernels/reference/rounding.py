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
"""Decades of the tree: one for each bit beside the sign."""
LARGEST_POWER, NON_FINITE = 126, 127
"""Codes of "power" for the scale itself and for a non-finite entry."""
SMALLEST_SCALE = -24
"""Exponent of the smallest scale of "power": from there the codes reach down to 2^-149."""


def round_pack(x: Tensor, spec: RoundingSpec, key: Key) -> tuple[Tensor, Tensor]:
    """Returns packed codes of `spec.width` bits, and one float32 scale per bucket.

    A non-finite entry makes the scale of its bucket non-finite (for "power": only its own code).
    """
    rows = _rows(x, spec.bucket)
    if spec.kind == "power":
        codes, scales = _powers(rows, key)
    else:
        scales = _scales(rows, spec)
        codes = _codes(rows, _scaled(rows.abs(), scales, spec.scaled_max), spec, key)
        scales = scales / torch.full_like(scales, spec.scale_divisor)
    return pack_bits(codes.view(-1)[: x.numel()].long(), spec.width), scales


def round_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, spec: RoundingSpec, key: Key
) -> tuple[Tensor, Tensor]:
    """Computes `round_pack` of x + decay * residual; `residual_out` then holds the rounding error.

    `residual_out` may be the residual.
    """
    total = torch.add(x, residual, alpha=decay, out=residual_out)
    codes, scales = round_pack(total, spec, key)
    round_add(residual_out, codes.unsqueeze(0), scales.unsqueeze(0), -1.0, spec)
    return codes, scales


def round_add(
    out: Tensor, codes: Tensor, scales: Tensor, weight: float, spec: RoundingSpec
) -> None:
    """Adds `weight` times the decoded numbers of each row of codes and scales, in order.

    Each row is contiguous; the rows may be anywhere in memory.
    """
    table = decode_table(spec, out.device)
    for row, scale in zip(codes, scales * weight, strict=True):
        code = unpack_bits(row, spec.width, out.numel())
        out.add_(table[code] * scale.repeat_interleave(spec.bucket)[: out.numel()])


def decode_table(spec: RoundingSpec, device: torch.device) -> Tensor:
    """Returns the number in [-1, 1] (for "power" also infinity) of each code, in float32."""
    if spec.kind in ("stochastic", "nearest"):
        code = torch.arange(1 << spec.width, device=device)
        return (code - spec.levels) * torch.tensor(1 / spec.levels, device=device)
    code = torch.arange(128, device=device)
    if spec.kind == "tree":
        positive = tree(device).to(torch.float32)
    elif spec.kind == "power":
        positive = torch.ldexp(torch.ones(128, device=device), code - LARGEST_POWER)
        positive[0], positive[NON_FINITE] = 0.0, torch.inf
    else:
        positive = code.to(torch.uint8).view(_float8(spec)).to(torch.float32) / spec.scaled_max
    return torch.cat([positive, -positive])


def tree(device: torch.device) -> Tensor:
    """Returns the 128 levels of the tree, ascending from 0 to 1, in float64.

    The zero bits before the first one count the decades below 1; the k bits after it divide that
    decade into 2^k even steps, and a level is the upper end of its step.
    """
    levels = [torch.zeros(1, dtype=torch.float64, device=device)]
    for k in range(DECADES):
        step = torch.arange(1, (1 << k) + 1, dtype=torch.float64, device=device)
        levels.append((step * 0.9 / (1 << k) + 0.1) * 10.0 ** (k + 1 - DECADES))
    return torch.cat(levels)


def _float8(spec: RoundingSpec) -> torch.dtype:
    return torch.float8_e4m3fn if spec.kind == "e4m3" else torch.float8_e5m2


def _rows(x: Tensor, bucket: int) -> Tensor:
    """Returns `x` as [buckets, bucket], padded with zeros."""
    buckets = -(-x.numel() // bucket)
    rows = x.new_zeros(buckets * bucket)
    rows[: x.numel()] = x
    return rows.view(buckets, bucket)


def _scales(rows: Tensor, spec: RoundingSpec) -> Tensor:
    if spec.scale == "l2":
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        return norms.to(rows.dtype)
    largest = rows.abs().amax(dim=1)
    return largest.to(torch.bfloat16).to(rows.dtype) if spec.scale == "max16" else largest


def _scaled(size: Tensor, scales: Tensor, top: float) -> Tensor:
    """Returns `size` in units of scale/top, clamped to [0, top]; NaN becomes 0."""
    # Reciprocals of very small and very large numbers leave the range of float32.
    rescale = torch.where(scales < 2.0**-64, 2.0**64, torch.where(scales > 2.0**64, 2.0**-64, 1.0))
    # A division of tensors, since torch computes number / tensor as number times reciprocal.
    step = torch.where(scales > 0, torch.full_like(scales, top) / (scales * rescale), 0)
    exact = size * rescale.unsqueeze(1) * step.unsqueeze(1)
    return torch.where(exact > 0, exact, 0.0).clamp_(max=top)


def _codes(rows: Tensor, exact: Tensor, spec: RoundingSpec, key: Key) -> Tensor:
    if spec.kind == "stochastic":
        down = exact.floor()
        noise = uniform(key, rows.numel(), rows.device).view(rows.shape)
        level = down + (noise < exact - down).to(rows.dtype)
        return torch.where(rows < 0, spec.levels - level, spec.levels + level)
    if spec.kind == "nearest":
        level = exact.round()
        return torch.where(rows < 0, spec.levels - level, spec.levels + level)
    code = _leaf(exact) if spec.kind == "tree" else exact.to(_float8(spec)).view(torch.uint8)
    return code.long() + 128 * (rows < 0)


def _leaf(exact: Tensor) -> Tensor:
    """Returns the code of the nearest level of the tree."""
    decade = torch.zeros_like(exact, dtype=torch.long)
    for k in range(1, DECADES):
        decade += exact > 10.0 ** (k - DECADES)
    steps = 1 << decade
    # A ninth of the steps lies below the decade; the lowest one begins at zero.
    below = torch.where(decade > 0, steps, 0).to(exact.dtype) * torch.tensor(1 / 9)
    return steps - 1 + (exact * slopes(exact.device)[decade] - below).round().long()


def slopes(device: torch.device) -> Tensor:
    """Returns the steps per unit in each decade of the tree; the lowest decade begins at zero."""
    k = torch.arange(DECADES, dtype=torch.float64, device=device)
    slope = 2**k / 0.9 * 10 ** (DECADES - 1 - k)
    slope[0] = 10.0 ** (DECADES - 1)
    return slope.to(torch.float32)


def _powers(rows: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    size = rows.abs()
    # Subnormal numbers have no exponent of their own.
    small = size < 2.0**-64
    bits = torch.where(small, size * 2.0**64, size).view(torch.int32).long()
    non_finite = bits >= 0x7F800000
    # Adds 23 random bits to the 23 of the fraction: the probability of a carry is the fraction.
    noise = random_bits(key, rows.numel(), rows.device).view(rows.shape) & 0x7FFFFF
    power = ((bits + noise) >> 23).clamp(max=254) - 64 * small.long()
    zero = 127 + SMALLEST_SCALE - LARGEST_POWER
    largest = power.masked_fill(non_finite, zero).amax(dim=1)
    base = (largest - LARGEST_POWER).clamp(min=zero)
    code = (power - base.unsqueeze(1)).clamp(min=0).masked_fill(non_finite, NON_FINITE) + 128 * (
        rows < 0
    )
    return code, ((base + LARGEST_POWER) << 23).to(torch.int32).view(torch.float32)
