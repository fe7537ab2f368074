"""Counter-based random numbers: the same bits as kernels/reference/random.py."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.jit import compiled, inlined
from gradwire.kernels.cpu.simd import hash32
from gradwire.kernels.cpu.threads import in_slices

BLOCK = 1024
"""Words that are converted while they are in the L1 cache."""


@inlined
def random_word(place: int, low: np.uint32, high: np.uint32) -> np.uint32:
    x = hash32(np.uint32(np.uint32(place & 0xFFFFFFFF) ^ low))
    return hash32(np.uint32(x ^ high ^ np.uint32(place >> 32)))


@compiled
def random_words(first: int, low: np.uint32, high: np.uint32, out: NDArray[np.uint32]) -> None:
    """Writes the words of the positions from `first` on."""
    block = first >> 32
    if block != (first + out.size) >> 32:
        for i in range(out.size):
            out[i] = random_word(first + i, low, high)
        return
    start, high = np.uint32(first & 0xFFFFFFFF), np.uint32(high ^ np.uint32(block))
    for i in range(out.size):
        word = hash32(np.uint32(np.uint32(start + np.uint32(i)) ^ low))
        out[i] = hash32(np.uint32(word ^ high))


@compiled
def _uniform(first: int, low: np.uint32, high: np.uint32, out: NDArray[np.float32]) -> None:
    words = np.empty(BLOCK, dtype=np.uint32)
    for start in range(0, out.size, BLOCK):
        numbers = out[start : start + BLOCK]
        random_words(first + start, low, high, words[: numbers.size])
        for i in range(numbers.size):
            numbers[i] = np.float32(np.int32(words[i] >> np.uint32(8))) * np.float32(2.0**-24)


@compiled
def _strata(low: np.uint32, high: np.uint32, numel: int, out: NDArray[np.int64]) -> None:
    count = out.size
    start = 0
    for i in range(count):
        stop = (i + 1) * numel // count
        out[i] = start + ((np.int64(random_word(i, low, high)) * (stop - start)) >> 32)
        start = stop


@compiled
def _blocks(
    low: np.uint32,
    high: np.uint32,
    numel: int,
    block: int,
    out: NDArray[np.int64],
) -> None:
    count = out.size
    blocks, spare = -(-count // block), numel - count
    rotation = (np.int64(random_word(numel, low, high) >> np.uint32(1)) * numel) >> 31
    rotated = np.empty(count, dtype=np.int64)
    # First entry that is rotated past the end; the entries from there on come first.
    wrapped = count
    first, edge, first_rest, edge_rest = 0, 0, 0, 0
    for i in range(blocks):
        # count * (i + 1) // blocks and spare * (i + 1) // blocks, without a division.
        last, first_rest = first + count // blocks, first_rest + count % blocks
        if first_rest >= blocks:
            last, first_rest = last + 1, first_rest - blocks
        next_edge, edge_rest = edge + spare // blocks, edge_rest + spare % blocks
        if edge_rest >= blocks:
            next_edge, edge_rest = next_edge + 1, edge_rest - blocks
        choices = next_edge - edge + 1
        before = edge + ((np.int64(random_word(i, low, high)) * choices) >> 32) + rotation
        if last + before > numel:
            wrapped = min(wrapped, max(first, numel - before))
        for j in range(first, last):
            rotated[j] = j + before
        first, edge = last, next_edge
    for j in range(wrapped, count):
        out[j - wrapped] = rotated[j] - numel
    for j in range(wrapped):
        out[count - wrapped + j] = rotated[j]


def key_words(key: int) -> tuple[np.uint32, np.uint32]:
    """Returns the low and the high half of the key, as the loops take them."""
    return np.uint32(key & 0xFFFFFFFF), np.uint32((key >> 32) & 0xFFFFFFFF)


def uniform(key: int, count: int, device: torch.device) -> Tensor:
    assert device.type == "cpu"
    out = torch.empty(count)
    numbers, words = out.numpy(), key_words(key)
    in_slices(lambda start, stop: _uniform(start, *words, numbers[start:stop]), count, BLOCK)
    return out


def strata(key: int, numel: int, count: int, device: torch.device) -> Tensor:
    assert device.type == "cpu"
    out = torch.empty(count, dtype=torch.int64)
    low, high = key_words(key)
    _strata(low, high, numel, out.numpy())
    return out


def random_blocks(key: int, numel: int, count: int, block: int, device: torch.device) -> Tensor:
    assert device.type == "cpu"
    out = torch.empty(count, dtype=torch.int64)
    low, high = key_words(key)
    _blocks(low, high, numel, block, out.numpy())
    return out
