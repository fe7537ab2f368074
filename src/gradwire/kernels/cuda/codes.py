"""Scales and quantizer codes of whole buckets, the rows of a program's tile."""

import triton
import triton.language as tl

from gradwire.kernels.cuda.random import fraction
from gradwire.kernels.reference.rounding import LARGEST_POWER, NON_FINITE, SMALLEST_SCALE


@triton.jit
def nearest(x):
    """Rounds numbers from 0 to 2^22 to the nearest integer, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def scaled(size, scale, TOP: tl.constexpr):
    """Returns `size` [rows, entries] in units of scale/TOP, clamped to [0, TOP]; NaN becomes 0."""
    rescale = tl.where(scale < 2.0**-64, 2.0**64, tl.where(scale > 2.0**64, 2.0**-64, 1.0))
    top = tl.full(scale.shape, TOP, tl.float32)
    step = tl.where(scale > 0, tl.div_rn(top, scale * rescale), 0.0)
    exact = size * rescale[:, None] * step[:, None]
    exact = tl.where(exact > 0, exact, 0.0)
    return tl.where(exact < TOP, exact, TOP)


@triton.jit
def round_level(exact, word, KIND: tl.constexpr):
    if KIND == "stochastic":
        down = tl.floor(exact)
        found = down + (fraction(word) < exact - down).to(tl.float32)
    else:
        found = nearest(exact)
    return found


@triton.jit
def float8_code(exact, FRACTION: tl.constexpr, BIAS: tl.constexpr):
    shift: tl.constexpr = 23 - FRACTION
    bits = exact.to(tl.int32, bitcast=True)
    even = (bits + ((1 << (22 - FRACTION)) - 1) + ((bits >> shift) & 1)) >> shift
    # Subnormals are multiples of the smallest number.
    small = nearest(exact * 2.0 ** (BIAS - 1 + FRACTION)).to(tl.int32)
    return tl.where(exact >= 2.0 ** (1 - BIAS), even - ((127 - BIAS) << FRACTION), small)


@triton.jit
def tree_code(exact, table_ptr):
    """Returns the code of the nearest level of the tree; the table holds levels, then slopes."""
    decade = (exact > 1e-6).to(tl.int32) + (exact > 1e-5).to(tl.int32)
    decade += (exact > 1e-4).to(tl.int32) + (exact > 1e-3).to(tl.int32)
    decade += (exact > 1e-2).to(tl.int32) + (exact > 1e-1).to(tl.int32)
    slope = tl.load(table_ptr + 128 + decade)
    steps = 1 << decade
    # A ninth of the steps lies below the decade; none below the lowest.
    below = (steps & -2).to(tl.float32) * 0.1111111111111111
    return steps - 1 + nearest(tl.maximum(exact * slope - below, 0.0)).to(tl.int32)


@triton.jit
def power_exponent(size, word):
    """Returns the biased exponents of powers of two, rounded to, and which are not finite."""
    small = size < 2.0**-64
    bits = tl.where(small, size * 2.0**64, size).to(tl.int32, bitcast=True)
    nonfinite = bits >= 0x7F800000
    rounded = tl.minimum((bits + (word & 0x7FFFFF).to(tl.int32)) >> 23, 254)
    return tl.where(nonfinite, -64, rounded - tl.where(small, 64, 0)), nonfinite


@triton.jit
def decode(code, table_ptr, KIND: tl.constexpr, LEVELS: tl.constexpr):
    """Returns the number in [-1, 1] that a code (int32) stands for."""
    if LEVELS > 0:
        # The code becomes the lowest bits of 2^23, which is faster than a conversion.
        whole = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LEVELS)
        number = whole * (1.0 / LEVELS)
    else:
        size = code & 127
        if KIND == "tree":
            found = tl.load(table_ptr + size)
        elif KIND == "power":
            exponent = tl.where(size == 127, 255, size + 1) << 23
            found = tl.where(size > 0, exponent, 0).to(tl.float32, bitcast=True)
        elif KIND == "e4m3":
            # An 8-bit float shifted into a float32 is the same number, except for the bias.
            found = (size << 20).to(tl.float32, bitcast=True) * 2.0**112
        else:
            found = (size << 21).to(tl.float32, bitcast=True) * 2.0**97
        number = tl.where(code >= 128, -found, found)
    return number


_LEAST_BASE = tl.constexpr(127 + SMALLEST_SCALE - LARGEST_POWER)
_LARGEST_POWER = tl.constexpr(LARGEST_POWER)
_BAD = tl.constexpr(NON_FINITE)


@triton.jit
def _scales(total, SCALE: tl.constexpr):
    if SCALE == "l2":
        wide = total.to(tl.float64)
        scale = tl.sqrt(tl.sum(wide * wide, axis=1)).to(tl.float32)
    else:
        # The bits of magnitudes sort like the magnitudes, with NaN above all.
        bits = tl.max(tl.abs(total).to(tl.int32, bitcast=True), axis=1)
        if SCALE == "max16":
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            bits = tl.where(bits <= 0x7F800000, rounded, bits)
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def encode(
    total, word, table_ptr, KIND: tl.constexpr, SCALE: tl.constexpr, TOP: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Returns codes [rows, entries] and scales [rows]."""
    size = tl.abs(total)
    if KIND == "power":
        exponent, nonfinite = power_exponent(size, word)
        base = tl.maximum(tl.max(exponent, axis=1) - _LARGEST_POWER, _LEAST_BASE)
        scale = ((base + _LARGEST_POWER) << 23).to(tl.float32, bitcast=True)
        code = tl.where(nonfinite, _BAD, tl.maximum(exponent - base[:, None], 0))
    else:
        scale = _scales(total, SCALE)
        exact = scaled(size, scale, TOP)
        if LEVELS > 0:
            found = round_level(exact, word, KIND)
            code = (tl.where(total < 0, -found, found) + TOP).to(tl.int32)
        elif KIND == "tree":
            code = tree_code(exact, table_ptr)
        elif KIND == "e4m3":
            code = float8_code(exact, 3, 7)
        else:
            code = float8_code(exact, 2, 15)
    if LEVELS == 0:
        code += tl.where(total < 0, 128, 0)
    return code, scale
