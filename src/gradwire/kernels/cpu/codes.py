"""Quantizer codes of a tile of buckets: one loop for each rounding kind of `kernels/specs.py`.

Rows are buckets, and a tile fits the L1 cache. Each loop reads entries and scales, and writes codes
and the rounding error; it is simple enough for the compiler to vectorize.
"""

import numpy as np
from numpy.typing import NDArray

from gradwire.kernels.cpu.jit import compiled, compiled_sums, inlined
from gradwire.kernels.cpu.simd import bits_of, number_of
from gradwire.kernels.reference.rounding import LARGEST_POWER, NON_FINITE, SMALLEST_SCALE

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]

KINDS = ("stochastic", "nearest", "e4m3", "e5m2", "tree", "power")
STOCHASTIC, NEAREST, E4M3, E5M2, TREE, POWER = range(6)

ZERO, ONE = np.float32(0), np.float32(1)
NOT_FINITE = np.int32(1000)
"""Exponent that stands for a non-finite entry."""
LEAST_BASE = np.int32(127 + SMALLEST_SCALE - LARGEST_POWER)


@inlined
def _rescale(scale: np.float32) -> np.float32:
    """Returns a factor that keeps the reciprocal of the scale in the range of float32."""
    if scale < np.float32(2.0**-64):
        return np.float32(2.0**64)
    return np.float32(2.0**-64) if scale > np.float32(2.0**64) else ONE


@inlined
def _scaled(x: np.float32, rescale: np.float32, step: np.float32, top: np.float32) -> np.float32:
    """Returns |x| in units of scale/top, clamped to [0, top]; NaN becomes 0."""
    exact = abs(x) * rescale * step
    exact = exact if exact > ZERO else ZERO
    return exact if exact < top else top


@inlined
def _sign_bit(x: np.float32) -> np.int32:
    return np.int32(128) if x < 0 else np.int32(0)


@compiled
def to_level(
    x: Floats,
    words: Words,
    stochastic: bool,
    scales: Floats,
    divisor: np.float32,
    top: np.float32,
    codes: Bytes,
    rest: Floats,
) -> None:
    """Rounds to uniform levels; divides the scales by `divisor`, as they are transmitted."""
    part = ONE / top
    for b in range(x.shape[0]):
        scale, rescale = scales[b], _rescale(scales[b])
        step = top / (scale * rescale) if scale > 0 else ZERO
        sent = scale / divisor
        scales[b] = sent
        for i in range(x.shape[1]):
            exact = _scaled(x[b, i], rescale, step, top)
            if stochastic:
                down = np.floor(exact)
                noise = np.float32(np.int32(words[b, i] >> np.uint32(8))) * np.float32(2.0**-24)
                level = down + (ONE if noise < exact - down else ZERO)
            else:
                level = np.rint(exact)
            signed = -level if x[b, i] < 0 else level
            codes[b, i] = np.uint8(np.int32(signed + top))
            rest[b, i] = x[b, i] - signed * part * sent


@compiled
def to_float8(
    x: Floats, kind: int, scales: Floats, top: np.float32, codes: Bytes, rest: Floats
) -> None:
    """Rounds to 8-bit floating point, nearest even."""
    fraction, bias = (3, 7) if kind == E4M3 else (2, 15)
    shift = np.int32(23 - fraction)
    half, offset = np.int32((1 << (22 - fraction)) - 1), np.int32((127 - bias) << fraction)
    least, steps = np.float32(2.0 ** (1 - bias)), np.float32(2.0 ** (bias - 1 + fraction))
    factor = _float8_factor(kind)
    for b in range(x.shape[0]):
        scale, rescale = scales[b], _rescale(scales[b])
        step = top / (scale * rescale) if scale > 0 else ZERO
        for i in range(x.shape[1]):
            exact = _scaled(x[b, i], rescale, step, top)
            bits = bits_of(exact)
            even = (bits + half + ((bits >> shift) & np.int32(1))) >> shift
            # Below the smallest normal number there are only multiples of the smallest number.
            code = even - offset if exact >= least else np.int32(np.rint(exact * steps))
            size = number_of(code << shift) * factor
            codes[b, i] = np.uint8(code | _sign_bit(x[b, i]))
            rest[b, i] = x[b, i] - (-size if x[b, i] < 0 else size) * scale


@inlined
def _float8_factor(kind: int) -> np.float32:
    """Returns the factor that corrects the exponent bias of float8 bits read as a float32."""
    return np.float32(2.0**112) if kind == E4M3 else np.float32(2.0**97)


@inlined
def _exceeds(number: np.float32, bound: float) -> np.int32:
    return np.int32(number > np.float32(bound))


@compiled
def scaled(x: Floats, scales: Floats, out: Floats) -> None:
    """Writes |x| / scale, row by row."""
    for b in range(x.shape[0]):
        scale, rescale = scales[b], _rescale(scales[b])
        step = ONE / (scale * rescale) if scale > 0 else ZERO
        for i in range(x.shape[1]):
            out[b, i] = _scaled(x[b, i], rescale, step, ONE)


@compiled
def to_tree(x: Floats, exact: Floats, slope: Floats, codes: Bytes) -> None:
    """Writes the codes of the nearest levels of the tree to numbers that are scaled already."""
    a0, a1, a2, a3, a4, a5, a6 = (
        slope[0],
        slope[1],
        slope[2],
        slope[3],
        slope[4],
        slope[5],
        slope[6],
    )
    for i in range(x.size):
        number = exact[i]
        a = a1 if number > np.float32(1e-6) else a0
        a = a2 if number > np.float32(1e-5) else a
        a = a3 if number > np.float32(1e-4) else a
        a = a4 if number > np.float32(1e-3) else a
        a = a5 if number > np.float32(1e-2) else a
        a = a6 if number > np.float32(1e-1) else a
        decade = _exceeds(number, 1e-6) + _exceeds(number, 1e-5) + _exceeds(number, 1e-4)
        decade += _exceeds(number, 1e-3) + _exceeds(number, 1e-2) + _exceeds(number, 1e-1)
        steps = np.int32(1) << decade
        # A ninth of the steps lies below the decade; the lowest one begins at zero.
        below = np.float32(steps & np.int32(-2)) * np.float32(1 / 9)
        code = steps - np.int32(1) + np.int32(np.rint(number * a - below))
        codes[i] = np.uint8(code | _sign_bit(x[i]))


@compiled
def table_error(x: Floats, table: Floats, scales: Floats, codes: Bytes, rest: Floats) -> None:
    """Writes the rounding error of codes that are decoded by a table."""
    for b in range(x.shape[0]):
        scale = scales[b]
        for i in range(x.shape[1]):
            rest[b, i] = x[b, i] - table[codes[b, i]] * scale


@inlined
def _power(x: np.float32, word: np.uint32) -> np.int32:
    """Returns the biased exponent of the power that an entry is rounded to."""
    size = abs(x)
    small = size < np.float32(2.0**-64)
    bits = bits_of(size * np.float32(2.0**64) if small else size)
    rounded = min((bits + np.int32(word & np.uint32(0x7FFFFF))) >> np.int32(23), np.int32(254))
    rounded -= np.int32(64) if small else np.int32(0)
    return NOT_FINITE if bits >= np.int32(0x7F800000) else rounded


@inlined
def _power_of(code: np.int32) -> np.float32:
    exponent = np.int32(255) if code == np.int32(NON_FINITE) else code + np.int32(1)
    return number_of(exponent << np.int32(23) if code > 0 else np.int32(0))


@compiled
def to_power(
    x: Floats, words: Words, power: NDArray[np.int32], scales: Floats, codes: Bytes, rest: Floats
) -> None:
    """Rounds to powers of two, and writes the scales; `power` is scratch memory."""
    for b in range(x.shape[0]):
        largest = LEAST_BASE
        for i in range(x.shape[1]):
            power[b, i] = _power(x[b, i], words[b, i])
            largest = max(largest, power[b, i] if power[b, i] < NOT_FINITE else LEAST_BASE)
        base = max(largest - np.int32(LARGEST_POWER), LEAST_BASE)
        scale = number_of((base + np.int32(LARGEST_POWER)) << np.int32(23))
        scales[b] = scale
        for i in range(x.shape[1]):
            code = max(power[b, i] - base, np.int32(0))
            code = np.int32(NON_FINITE) if power[b, i] == NOT_FINITE else code
            size = _power_of(code)
            codes[b, i] = np.uint8(code | _sign_bit(x[b, i]))
            rest[b, i] = x[b, i] - (-size if x[b, i] < 0 else size) * scale


@compiled
def decode(codes: Bytes, kind: int, top: np.float32, table: Floats, numbers: Floats) -> None:
    """Writes the number in [-1, 1] of each code."""
    if kind in (STOCHASTIC, NEAREST):
        part = ONE / top
        for i in range(numbers.size):
            numbers[i] = (np.float32(codes[i]) - top) * part
    elif kind == TREE:
        for i in range(numbers.size):
            numbers[i] = table[codes[i]]
    elif kind == POWER:
        for i in range(numbers.size):
            size = _power_of(np.int32(codes[i] & np.uint8(127)))
            numbers[i] = -size if codes[i] & np.uint8(128) else size
    else:
        shift, factor = np.int32(20 if kind == E4M3 else 21), _float8_factor(kind)
        for i in range(numbers.size):
            size = number_of(np.int32(codes[i] & np.uint8(127)) << shift) * factor
            numbers[i] = -size if codes[i] & np.uint8(128) else size


SCALES = ("max", "l2", "max16")
MAX, L2, MAX16 = range(3)


@compiled_sums
def _row_norms(x: Floats, scales: Floats) -> None:
    for b in range(x.shape[0]):
        squares = 0.0
        for i in range(x.shape[1]):
            squares += np.float64(x[b, i]) * np.float64(x[b, i])
        scales[b] = np.float32(np.sqrt(squares))


@compiled
def _row_maxima(x: Floats, short: bool, scales: Floats) -> None:
    """Writes the largest magnitude of each row; `short` rounds it to bfloat16."""
    for b in range(x.shape[0]):
        # The bits of magnitudes sort as the magnitudes do; NaN is the largest.
        largest = np.int32(0)
        for i in range(x.shape[1]):
            largest = max(largest, bits_of(x[b, i]) & np.int32(0x7FFFFFFF))
        if short and largest <= np.int32(0x7F800000):
            odd = (largest >> np.int32(16)) & np.int32(1)
            largest = (largest + np.int32(0x7FFF) + odd) & np.int32(-0x10000)
        scales[b] = number_of(largest)


@compiled
def encode(
    x: Floats,
    kind: int,
    norm: int,
    divisor: np.float32,
    top: np.float32,
    tables: tuple[Floats, Floats],
    words: Words,
    exact: Floats,
    codes: Bytes,
    scales: Floats,
    rest: Floats,
) -> None:
    """Writes codes, scales and rounding errors of the rows of `x`; `exact` is scratch memory."""
    if kind == POWER:
        to_power(x, words, exact.view(np.int32), scales, codes, rest)
        return
    if norm == L2:
        _row_norms(x, scales)
    else:
        _row_maxima(x, norm == MAX16, scales)
    if kind == TREE:
        scaled(x, scales, exact)
        to_tree(x.reshape(-1), exact.reshape(-1), tables[0], codes.reshape(-1))
        table_error(x, tables[1], scales, codes, rest)
    elif kind in (E4M3, E5M2):
        to_float8(x, kind, scales, top, codes, rest)
    elif kind == STOCHASTIC:
        to_level(x, words, True, scales, divisor, top, codes, rest)
    else:
        to_level(x, words, False, scales, divisor, top, codes, rest)
