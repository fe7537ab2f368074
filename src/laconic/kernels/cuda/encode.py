"""Scales and codes of whole buckets, the rows of what a program holds."""

import triton
import triton.language as tl

from laconic.kernels.cuda import codes as rules
from laconic.kernels.reference.rounding import BAD, LARGEST_POWER, SMALLEST_SCALE

_LEAST_BASE = tl.constexpr(127 + SMALLEST_SCALE - LARGEST_POWER)
_LARGEST_POWER = tl.constexpr(LARGEST_POWER)
_BAD = tl.constexpr(BAD)


@triton.jit
def _scales(total, SCALE: tl.constexpr):
    if SCALE == "l2":
        wide = total.to(tl.float64)
        found = tl.sqrt(tl.sum(wide * wide, axis=1)).to(tl.float32)
    else:
        # The bits of magnitudes sort as they do, and NaN above them all.
        bits = tl.max(tl.abs(total).to(tl.int32, bitcast=True), axis=1)
        if SCALE == "max16":
            short = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            bits = tl.where(bits <= 0x7F800000, short, bits)
        found = bits.to(tl.float32, bitcast=True)
    return found


@triton.jit
def encode(
    total, word, table_ptr, KIND: tl.constexpr, SCALE: tl.constexpr, TOP: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Codes [rows, entries] and scales [rows]."""
    size = tl.abs(total)
    if KIND == "power":
        exponent, bad = rules.power(size, word)
        base = tl.maximum(tl.max(exponent, axis=1) - _LARGEST_POWER, _LEAST_BASE)
        scale = ((base + _LARGEST_POWER) << 23).to(tl.float32, bitcast=True)
        code = tl.where(bad, _BAD, tl.maximum(exponent - base[:, None], 0))
    else:
        scale = _scales(total, SCALE)
        exact = rules.scaled(size, scale, TOP)
        if LEVELS > 0:
            found = rules.level(exact, word, KIND)
            code = (tl.where(total < 0, -found, found) + TOP).to(tl.int32)
        elif KIND == "tree":
            code = rules.leaf(exact, table_ptr)
        elif KIND == "e4m3":
            code = rules.float8_code(exact, 3, 7)
        else:
            code = rules.float8_code(exact, 2, 15)
    if LEVELS == 0:
        code += tl.where(total < 0, 128, 0)
    return code, scale
