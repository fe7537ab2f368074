"""Signs, one bit each, with a mean for each side of zero (kernels/reference/sides.py)."""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.kernels.cpu.arrays import flat_rows
from laconic.kernels.cpu.jit import called, compiled, inlined
from laconic.kernels.cpu.sums import BLOCK, Floats, measure, settle
from laconic.kernels.cpu.threads import in_slices
from laconic.kernels.cpu.vector import LANES, add_either, word_at
from laconic.kernels.door import check_out
from laconic.types import Given

Bytes = NDArray[np.uint8]


@inlined
def _add_one(
    out: Floats, i: int, bits: Bytes, first: int, low: np.float32, high: np.float32
) -> None:
    out[i] += low if (bits[first + i // 8] >> np.uint8(i % 8)) & 1 else high


@called
def _add_run(
    out: Floats, start: int, stop: int, bits: Bytes, first: int, low: np.float32, high: np.float32
) -> None:
    """Entries from `start` to `stop`, whose signs are in the message that begins at `first`."""
    i = start
    while i < stop and i % LANES:
        _add_one(out, i, bits, first, low, high)
        i += 1
    while i + LANES <= stop:
        add_either(out, i, word_at(bits, first + i // 8), low, high)
        i += LANES
    while i < stop:
        _add_one(out, i, bits, first, low, high)
        i += 1


@compiled
def _add(
    out: Floats,
    bits: Bytes,
    distance: int,
    low: NDArray[np.float32],
    high: Floats,
    bucket: int,
    begin: int,
    end: int,
) -> None:
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        for row in range(low.shape[0]):
            for b in range(start // bucket, (stop - 1) // bucket + 1):
                first, last = max(start, b * bucket), min(stop, (b + 1) * bucket)
                _add_run(out, first, last, bits, row * distance, low[row, b], high[row, b])


def _means(sums: NDArray[np.float64], numel: int, bucket: int) -> tuple[Tensor, Tensor]:
    below = sums[:, 2]
    above = np.minimum(bucket, numel - bucket * np.arange(below.size)) - below
    low, high = torch.empty(below.size), torch.empty(below.size)
    low.numpy()[:] = sums[:, 0] / np.maximum(1, below)
    high.numpy()[:] = sums[:, 1] / np.maximum(1, above)
    return low, high


def sides_pack(x: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    bits, sums = measure(Given(x), bucket)
    return bits, *_means(sums, x.numel(), bucket)


def sides_pack_sum(
    x: Tensor, residual: Tensor, decay: float, left: Tensor, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    bits, sums = measure(Given(x, residual, left, decay), bucket)
    low, high = _means(sums, x.numel(), bucket)
    settle(left, low, high, bucket)
    return bits, low, high


def sides_add(
    out: Tensor, bits: Tensor, low: Tensor, high: Tensor, weight: float, bucket: int
) -> None:
    check_out(out)
    packed, distance = flat_rows(bits)
    sides = (low * weight).numpy(), (high * weight).numpy()
    in_slices(partial(_add, out.numpy(), packed, distance, *sides, bucket), out.numel(), BLOCK)
