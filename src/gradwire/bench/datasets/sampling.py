"""Sampling of examples and keyed random numbers, which are equal on any device.

Batches are assigned in turn to all ranks of a step before the next step. Every epoch has its own
order, and its ranks share no example. Examples that do not fill the last batch are left out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire.kernels.reference.random import random_bits
from gradwire.types import mix


class BatchSlice(NamedTuple):
    """Positions `start` to `stop` in the order of an epoch."""

    epoch: int
    start: int
    stop: int


def batch_slice(count: int, batch_size: int, step: int, rank: int, workers: int) -> BatchSlice:
    """Returns the slice of `count` examples that one of `workers` takes in one step."""
    batches = count // batch_size
    if batches == 0:
        raise ConfigError(
            f"batch_size must be at most {count}, the number of examples, got {batch_size}"
        )
    epoch, place = divmod(step * workers + rank, batches)
    return BatchSlice(epoch, place * batch_size, (place + 1) * batch_size)


def merge_slices(slices: Sequence[BatchSlice]) -> list[BatchSlice]:
    """Merges slices that begin where the previous one stopped."""
    found = [slices[0]]
    for one in slices[1:]:
        last = found[-1]
        if (one.epoch, one.start) == (last.epoch, last.stop):
            found[-1] = last._replace(stop=one.stop)
        else:
            found.append(one)
    return found


def random_permutation(count: int, device: str, *key: int) -> Tensor:
    """Returns a random permutation of the numbers below `count`."""
    return random_bits(mix(*key), count, torch.device(device)).argsort(stable=True)


def random_integers(bound: int, count: int, device: str, *key: int) -> Tensor:
    """Returns `count` random integers from 0 to `bound` - 1."""
    return (random_bits(mix(*key), count, torch.device(device)) * bound) >> 32


def uniform_noise(shape: tuple[int, ...], device: str, *key: int) -> Tensor:
    """Returns uniform random numbers of mean 0 and variance 1."""
    bits = random_bits(mix(*key), torch.Size(shape).numel(), torch.device(device))
    return ((bits.double() / 2**32 - 0.5) * 12**0.5).float().view(shape)
