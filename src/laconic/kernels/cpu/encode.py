"""Scales and codes of a few buckets: the rows of a tile that fits the first cache."""

import numpy as np

from laconic.kernels.cpu.codes import (
    CHANCE,
    E4M3,
    E5M2,
    POWER,
    TREE,
    Bytes,
    Floats,
    Words,
    scaled,
    take_back,
    to_float8,
    to_leaf,
    to_level,
    to_power,
)
from laconic.kernels.cpu.jit import called, summing
from laconic.kernels.cpu.vector import bits_of, number_of

SCALES = ("max", "l2", "max16")
MAX, L2, MAX16 = range(3)


@summing
def _norms(x: Floats, scales: Floats) -> None:
    for b in range(x.shape[0]):
        squares = 0.0
        for i in range(x.shape[1]):
            squares += np.float64(x[b, i]) * np.float64(x[b, i])
        scales[b] = np.float32(np.sqrt(squares))


@called
def _largest(x: Floats, short: bool, scales: Floats) -> None:
    """The largest magnitude of each row; `short` rounds it to a bfloat16."""
    for b in range(x.shape[0]):
        # The bits of magnitudes sort as they do, and NaN above them all.
        largest = np.int32(0)
        for i in range(x.shape[1]):
            largest = max(largest, bits_of(x[b, i]) & np.int32(0x7FFFFFFF))
        if short and largest <= np.int32(0x7F800000):
            odd = (largest >> np.int32(16)) & np.int32(1)
            largest = (largest + np.int32(0x7FFF) + odd) & np.int32(-0x10000)
        scales[b] = number_of(largest)


@called
def encode(
    x: Floats,
    kind: int,
    how: int,
    over: np.float32,
    top: np.float32,
    tables: tuple[Floats, Floats],
    chance: Words,
    exact: Floats,
    codes: Bytes,
    scales: Floats,
    rest: Floats,
) -> None:
    """Writes codes and scales of the rows of `x`, and what they leave; `exact` is scratch."""
    if kind == POWER:
        to_power(x, chance, exact.view(np.int32), scales, codes, rest)
        return
    if how == L2:
        _norms(x, scales)
    else:
        _largest(x, how == MAX16, scales)
    if kind == TREE:
        scaled(x, scales, exact)
        to_leaf(x.reshape(-1), exact.reshape(-1), tables[0], codes.reshape(-1))
        take_back(x, tables[1], scales, codes, rest)
    elif kind in (E4M3, E5M2):
        to_float8(x, kind, scales, top, codes, rest)
    elif kind == CHANCE:
        to_level(x, chance, True, scales, over, top, codes, rest)
    else:
        to_level(x, chance, False, scales, over, top, codes, rest)
