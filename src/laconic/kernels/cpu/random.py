"""Random numbers as a function of (key, position): the bits of kernels/reference/random.py."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.kernels.cpu.jit import compiled, inlined


@inlined
def hash32(x: np.uint32) -> np.uint32:
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@inlined
def random_word(place: int, low: np.uint32, high: np.uint32) -> np.uint32:
    x = hash32(np.uint32(place & 0xFFFFFFFF) ^ low)
    return hash32(x ^ high ^ np.uint32(place >> 32))


@compiled
def _strata(low: np.uint32, high: np.uint32, numel: int, out: NDArray[np.int64]) -> None:
    count = out.size
    for i in range(count):
        start = i * numel // count
        width = (i + 1) * numel // count - start
        out[i] = start + ((np.int64(random_word(i, low, high)) * width) >> 32)


def halves(key: int) -> tuple[np.uint32, np.uint32]:
    """The key as the two words that the loops take."""
    return np.uint32(key & 0xFFFFFFFF), np.uint32((key >> 32) & 0xFFFFFFFF)


def strata(key: int, numel: int, count: int, device: torch.device) -> Tensor:
    assert device.type == "cpu"
    out = torch.empty(count, dtype=torch.int64)
    low, high = halves(key)
    _strata(low, high, numel, out.numpy())
    return out
