"""Which examples a worker takes in a step: keyed random numbers, equal on any device.

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


class Deal(NamedTuple):
    """Positions `start` to `stop` in the order of an epoch."""

    epoch: int
    start: int
    stop: int


def deal(count: int, batch_size: int, step: int, rank: int, workers: int) -> Deal:
    """What one of `workers` takes of `count` examples in one step."""
    batches = count // batch_size
    if batches == 0:
        raise ConfigError(f"batch_size must be at most {count}, all examples, got {batch_size}")
    epoch, place = divmod(step * workers + rank, batches)
    return Deal(epoch, place * batch_size, (place + 1) * batch_size)


def joined(deals: Sequence[Deal]) -> list[Deal]:
    """The same in fewer, where one begins where the one before it stopped."""
    found = [deals[0]]
    for one in deals[1:]:
        last = found[-1]
        if (one.epoch, one.start) == (last.epoch, last.stop):
            found[-1] = last._replace(stop=one.stop)
        else:
            found.append(one)
    return found


def shuffled(count: int, device: str, *key: int) -> Tensor:
    """The numbers below `count` in random order."""
    return random_bits(mix(*key), count, torch.device(device)).argsort(stable=True)


def numbers_below(bound: int, count: int, device: str, *key: int) -> Tensor:
    """`count` random numbers from 0 up to and without `bound`."""
    return (random_bits(mix(*key), count, torch.device(device)) * bound) >> 32


def noise(shape: tuple[int, ...], device: str, *key: int) -> Tensor:
    """Random numbers of mean 0 and variance 1, evenly spread."""
    bits = random_bits(mix(*key), torch.Size(shape).numel(), torch.device(device))
    return ((bits.double() / 2**32 - 0.5) * 12**0.5).float().view(shape)
