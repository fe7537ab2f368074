"""Counter-based random numbers: a function of (key, position), with the same bits on every device.

A counter goes twice through a 32-bit integer hash (multiply, xor-shift), once with each half of the
key. There is no generator state, so nothing depends on order, and torch's global generator is
untouched.
"""

import torch
from torch import Tensor

from gradwire.types import Key

MASK = 0xFFFFFFFF


def _hash32(x: Tensor) -> Tensor:
    # int64 overflow wraps around, which leaves the low 32 bits of a product correct.
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def random_bits(key: Key, count: int, device: torch.device) -> Tensor:
    """Returns 32 random bits for each of `count` positions, as int64."""
    return _words(key, torch.arange(count, device=device))


def _words(key: Key, place: Tensor) -> Tensor:
    low, high = key if isinstance(key, Tensor) else (key & MASK, key >> 32 & MASK)
    return _hash32(_hash32((place & MASK) ^ low) ^ high ^ (place >> 32))


def uniform(key: Key, count: int, device: torch.device) -> Tensor:
    """Returns `count` float32 numbers in [0, 1) on a grid of 2^-24."""
    return (random_bits(key, count, device) >> 8).to(torch.float32) * 2.0**-24


def strata(key: Key, numel: int, count: int, device: torch.device) -> Tensor:
    """Returns one position from each of `count` strata of [0, numel): ascending, distinct.

    The strata are fixed and their lengths differ by one where `count` does not divide `numel`, so
    an entry has one over the length of its stratum as probability: good for samples. With
    `random_blocks` of one entry every entry has the same probability.
    """
    edge = torch.arange(count + 1, device=device) * numel // max(1, count)
    start, width = edge[:-1], edge[1:] - edge[:-1]
    return start + ((random_bits(key, count, device) * width) >> 32)


def _rotation(key: Key, numel: int, device: torch.device) -> Tensor:
    """Returns a number below `numel`, from the word at `numel`, which no block uses."""
    return ((_words(key, torch.full((), numel, device=device)) >> 1) * numel) >> 31


def random_blocks(key: Key, numel: int, count: int, block: int, device: torch.device) -> Tensor:
    """Returns `count` positions in [0, numel) in blocks of at most `block`: ascending, distinct.

    There are as few blocks as possible, of equal length up to one. Each is placed at random in an
    interval of its own, and all are rotated around the end by a random number, so every entry has
    the same probability.
    """
    place = torch.arange(count, device=device)
    if not count:
        return place
    blocks, spare = -(-count // block), numel - count
    edge = torch.arange(blocks + 1, device=device) * spare // blocks
    choices = edge[1:] - edge[:-1] + 1
    # Number of entries that are left out before each block.
    before = edge[:-1] + ((random_bits(key, blocks, device) * choices) >> 32)
    # Entry j is in the last block that begins at or before it, block i at count * i // blocks.
    rotated = place + before[((place + 1) * blocks - 1) // count] + _rotation(key, numel, device)
    # Those rotated past the end come first. The host need not know their number.
    past = (rotated >= numel).sum()
    return rotated[(place - past) % count] % numel
