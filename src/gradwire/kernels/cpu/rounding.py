"""Quantization bucket by bucket (definition: kernels/reference/rounding.py).

A bucket fits the L1 cache, so several loops run over it before the next one is loaded.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu import codes as loops
from gradwire.kernels.cpu.arrays import flat_rows, residual_arrays
from gradwire.kernels.cpu.codes import SCALES, Bytes, Floats, encode
from gradwire.kernels.cpu.jit import compiled
from gradwire.kernels.cpu.packing import pack_codes, unpack_codes
from gradwire.kernels.cpu.random import key_words, random_words
from gradwire.kernels.cpu.simd import sum_of
from gradwire.kernels.cpu.threads import in_slices
from gradwire.kernels.reference.rounding import decode_table, slopes
from gradwire.kernels.specs import RoundingKind, RoundingSpec
from gradwire.kernels.validation import check_out
from gradwire.types import EFInput

TILE = 1024
"""Entries that are processed at a time: several small buckets, or one large one."""


@compiled
def _add_up(x: Floats, decay: np.float32, residual: Floats, out: Floats) -> None:
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            out[b, i] = sum_of(x[b, i], decay, residual[b, i])


@compiled
def _pack(
    x: Floats,
    decay: np.float32,
    residual: Floats,
    residual_out: Floats,
    kind: int,
    norm: int,
    divisor: np.float32,
    top: np.float32,
    width: int,
    tables: tuple[Floats, Floats],
    first: int,
    key: tuple[np.uint32, np.uint32],
    out: Bytes,
    scales: Floats,
    begin: int,
    end: int,
) -> None:
    """Packs tiles `begin` to `end` of x, or of x + decay * residual if `residual_out` is not empty.

    `x` has the shape [tiles, rows, bucket] and begins at entry `first` of the tensor.
    """
    _, rows, bucket = x.shape
    size = rows * bucket
    total, rest = np.empty((rows, bucket), np.float32), np.empty((rows, bucket), np.float32)
    codes, words = np.empty((rows, bucket), np.uint8), np.empty((rows, bucket), np.uint32)
    exact = np.empty((rows, bucket), np.float32)
    flat_codes, flat_words = codes.reshape(-1), words.reshape(-1)
    feedback, stochastic = residual_out.size > 0, kind in (loops.STOCHASTIC, loops.POWER)
    for tile in range(begin, end):
        start = first + tile * size
        entries = x[tile]
        if feedback:
            rest = residual_out[tile]
            _add_up(entries, decay, residual[tile], total)
            entries = total
        if stochastic:
            random_words(start, key[0], key[1], flat_words)
        tile_scales = scales[tile * rows : (tile + 1) * rows]
        encode(entries, kind, norm, divisor, top, tables, words, exact, codes, tile_scales, rest)
        pack_codes(flat_codes, out, start * width, width)


@compiled
def _add_scaled(out: Floats, numbers: Floats, scales: Floats, weight: np.float32) -> None:
    for b in range(out.shape[0]):
        unit = scales[b] * weight
        for i in range(out.shape[1]):
            out[b, i] += numbers[b, i] * unit


@compiled
def _add(
    out: Floats,
    packed: Bytes,
    distance: int,
    scales: Floats,
    apart: int,
    messages: int,
    weight: np.float32,
    kind: int,
    top: np.float32,
    width: int,
    table: Floats,
    first: int,
    begin: int,
    end: int,
) -> None:
    """Adds to tiles `begin` to `end` of `out`; a tile stays in the cache for all messages."""
    _, rows, bucket = out.shape
    codes, numbers = np.empty(rows * bucket, np.uint8), np.empty((rows, bucket), np.float32)
    flat = numbers.reshape(-1)
    for tile in range(begin, end):
        start = first + tile * rows * bucket
        for message in range(messages):
            unpack_codes(packed, 8 * message * distance + start * width, width, codes)
            loops.decode(codes, kind, top, table, flat)
            at = message * apart + tile * rows
            _add_scaled(out[tile], numbers, scales[at : at + rows], weight)


def _tiles(x: Tensor, bucket: int) -> list[tuple[int, NDArray[np.float32]]]:
    """Splits into views [tiles, rows, bucket] with their first entry: full tiles, then the rest."""
    rows = max(1, TILE // bucket)
    most = x.numel() // (rows * bucket) * rows * bucket
    whole = x.numel() // bucket * bucket
    parts = [
        (0, x[:most].view(-1, rows, bucket)),
        (most, x[most:whole].view(1, -1, bucket)),
        (whole, x[whole:].view(1, 1, -1)),
    ]
    return [(start, part.numpy()) for start, part in parts if part.numel()]


def _by_tiles(loop: Callable[[int, int], None], rows: NDArray[np.float32], effort: int) -> None:
    tile = rows[0].size
    # Codes of eight tiles fill whole bytes, so that no two threads write to the same one.
    in_slices(lambda start, stop: loop(start // tile, stop // tile), rows.size, 8 * tile, effort)


@cache
def _table(kind: RoundingKind, width: int) -> Floats:
    """Returns the number of each code, which does not depend on buckets and scales."""
    return decode_table(RoundingSpec(kind, 1, width), torch.device("cpu")).numpy()


@cache
def _slopes() -> Floats:
    return slopes(torch.device("cpu")).numpy()


def _round(ef: EFInput, spec: RoundingSpec, key: int) -> tuple[Tensor, Tensor]:
    x = ef.grad
    aligned = spec.width == 8 or (spec.width == 4 and spec.bucket % 2 == 0)
    make = torch.empty if aligned else torch.zeros
    codes = make(-(-x.numel() * spec.width // 8), dtype=torch.uint8)
    scales = torch.empty(-(-x.numel() // spec.bucket), dtype=torch.float32)
    residual, residual_out = residual_arrays(ef)
    kind, norm = loops.KINDS.index(spec.kind), SCALES.index(spec.scale)
    for start, rows in _tiles(x, spec.bucket):
        shape = rows.shape if residual_out.size else (0, 0, 0)
        part = slice(start, start + rows.size)
        pack = partial(
            _pack,
            rows, np.float32(ef.decay),
            residual[part].reshape(shape), residual_out[part].reshape(shape), kind, norm,
            np.float32(spec.scale_divisor), np.float32(spec.scaled_max), spec.width,
            (_slopes(), _table(spec.kind, spec.width)), start, key_words(key), codes.numpy(),
            scales.numpy()[start // spec.bucket :],
        )  # fmt: skip
        _by_tiles(pack, rows, effort=4)
    return codes, scales


def round_pack(x: Tensor, spec: RoundingSpec, key: int) -> tuple[Tensor, Tensor]:
    return _round(EFInput(x), spec, key)


def round_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, spec: RoundingSpec, key: int
) -> tuple[Tensor, Tensor]:
    return _round(EFInput(x, residual, residual_out, decay), spec, key)


def round_add(
    out: Tensor, codes: Tensor, scales: Tensor, weight: float, spec: RoundingSpec
) -> None:
    check_out(out)
    packed, distance = flat_rows(codes)
    units, apart = flat_rows(scales)
    kind, top = loops.KINDS.index(spec.kind), np.float32(spec.scaled_max)
    table = _table(spec.kind, spec.width)
    for start, rows in _tiles(out, spec.bucket):
        add = partial(
            _add,
            rows, packed, distance, units[start // spec.bucket :], apart, len(codes),
            np.float32(weight), kind, top, spec.width, table, start,
        )  # fmt: skip
        _by_tiles(add, rows, effort=len(codes))
