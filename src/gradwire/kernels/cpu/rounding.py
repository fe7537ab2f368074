"""Quantization bucket by bucket (definition: kernels/reference/rounding.py).

A bucket fits the L1 cache, so several loops run over it before the next one is loaded.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu import codes as rules
from gradwire.kernels.cpu.arrays import flat_rows, memory_of
from gradwire.kernels.cpu.codes import SCALES, Bytes, Floats, encode
from gradwire.kernels.cpu.jit import called, compiled
from gradwire.kernels.cpu.packing import pack_codes, unpack_codes
from gradwire.kernels.cpu.random import halves, random_words
from gradwire.kernels.cpu.simd import sum_of
from gradwire.kernels.cpu.threads import in_slices
from gradwire.kernels.reference.rounding import meaning, slopes
from gradwire.kernels.specs import RoundingKind, RoundingSpec
from gradwire.kernels.validation import check_out
from gradwire.types import EFInput

TILE = 1024
"""Entries that are worked on at a time: small buckets several, large ones alone."""


@called
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
    how: int,
    over: np.float32,
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
    """Buckets [tiles, rows, bucket] of x, or of x + decay * residual where there is a `residual_out`.

    Tiles from `begin` to `end`. So many entries come before the first of all as `first` says.
    """
    _, rows, bucket = x.shape
    size = rows * bucket
    total, rest = np.empty((rows, bucket), np.float32), np.empty((rows, bucket), np.float32)
    codes, chance = np.empty((rows, bucket), np.uint8), np.empty((rows, bucket), np.uint32)
    exact = np.empty((rows, bucket), np.float32)
    flat_codes, flat_chance = codes.reshape(-1), chance.reshape(-1)
    feedback, draws = residual_out.size > 0, kind in (rules.CHANCE, rules.POWER)
    for tile in range(begin, end):
        start = first + tile * size
        entries = x[tile]
        if feedback:
            rest = residual_out[tile]
            _add_up(entries, decay, residual[tile], total)
            entries = total
        if draws:
            random_words(start, key[0], key[1], flat_chance)
        here = scales[tile * rows : (tile + 1) * rows]
        encode(entries, kind, how, over, top, tables, chance, exact, codes, here, rest)
        pack_codes(flat_codes, out, start * width, width)


@called
def _add_scaled(out: Floats, said: Floats, scales: Floats, weight: np.float32) -> None:
    for b in range(out.shape[0]):
        unit = scales[b] * weight
        for i in range(out.shape[1]):
            out[b, i] += said[b, i] * unit


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
    """Buckets [tiles, rows, bucket] of `out`. A tile stays in the cache for all messages."""
    _, rows, bucket = out.shape
    codes, said = np.empty(rows * bucket, np.uint8), np.empty((rows, bucket), np.float32)
    flat = said.reshape(-1)
    for tile in range(begin, end):
        start = first + tile * rows * bucket
        for message in range(messages):
            unpack_codes(packed, 8 * message * distance + start * width, width, codes)
            rules.meanings(codes, kind, top, table, flat)
            at = message * apart + tile * rows
            _add_scaled(out[tile], said, scales[at : at + rows], weight)


def _tiles(x: Tensor, bucket: int) -> list[tuple[int, NDArray[np.float32]]]:
    """Buckets as [tiles, rows, bucket] and where they begin: most, a few, and a shorter one."""
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
def _meaning(kind: RoundingKind, width: int) -> Floats:
    return meaning(RoundingSpec(kind, 1, width), torch.device("cpu")).numpy()


def _table(rule: RoundingSpec) -> Floats:
    """What each code means; buckets and scales do not matter to that."""
    return _meaning(rule.kind, rule.width)


@cache
def _slopes() -> Floats:
    return slopes(torch.device("cpu")).numpy()


def _rounded(given: EFInput, rule: RoundingSpec, key: int) -> tuple[Tensor, Tensor]:
    x = given.grad
    aligned = rule.width == 8 or (rule.width == 4 and rule.bucket % 2 == 0)
    make = torch.empty if aligned else torch.zeros
    codes = make(-(-x.numel() * rule.width // 8), dtype=torch.uint8)
    scales = torch.empty(-(-x.numel() // rule.bucket), dtype=torch.float32)
    kept, rest = memory_of(given)
    how = rules.KINDS.index(rule.kind), SCALES.index(rule.scale)
    for start, rows in _tiles(x, rule.bucket):
        form = rows.shape if rest.size else (0, 0, 0)
        here = slice(start, start + rows.size)
        pack = partial(
            _pack,
            rows, np.float32(given.decay), kept[here].reshape(form), rest[here].reshape(form),
            *how, np.float32(rule.over), np.float32(rule.top), rule.width,
            (_slopes(), _table(rule)), start, halves(key), codes.numpy(),
            scales.numpy()[start // rule.bucket :],
        )  # fmt: skip
        _by_tiles(pack, rows, effort=4)
    return codes, scales


def round_pack(x: Tensor, rule: RoundingSpec, key: int) -> tuple[Tensor, Tensor]:
    return _rounded(EFInput(x), rule, key)


def round_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, rule: RoundingSpec, key: int
) -> tuple[Tensor, Tensor]:
    return _rounded(EFInput(x, residual, residual_out, decay), rule, key)


def round_add(
    out: Tensor, codes: Tensor, scales: Tensor, weight: float, rule: RoundingSpec
) -> None:
    check_out(out)
    packed, distance = flat_rows(codes)
    units, apart = flat_rows(scales)
    kind, top, table = rules.KINDS.index(rule.kind), np.float32(rule.top), _table(rule)
    for start, rows in _tiles(out, rule.bucket):
        add = partial(
            _add,
            rows, packed, distance, units[start // rule.bucket :], apart, len(codes),
            np.float32(weight), kind, top, rule.width, table, start,
        )  # fmt: skip
        _by_tiles(add, rows, effort=len(codes))
