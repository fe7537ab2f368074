"""Gradients whose mean comes a step late, so that it travels while the next ones are computed.

Every bucket has two rooms. In one lies the mean of the last step's gradients, or is on its way
there; into the other go this step's. When DDP has taken the mean out of the first, they change
places.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from laconic.errors import ConfigError
from laconic.mount.buckets import Load
from laconic.types import State


@dataclass
class _Rooms:
    """Of one bucket."""

    heard: Load
    """The mean of the last step's gradients, when its future is there."""
    told: Load
    """This step's gradients, once they are in."""


class Late:
    """What is under way of all buckets, and what has arrived."""

    def __init__(self, future: Callable[[], "Future[Tensor]"]) -> None:
        self._future = future
        self._rooms: dict[tuple[str, ...], _Rooms] = {}
        self._filled: list[_Rooms] = []
        self._loaded: State = {}

    def knows(self, names: Sequence[str]) -> bool:
        """Whether a bucket is as it was; if not, all must have arrived before it can change."""
        return tuple(names) in self._rooms or not self._rooms

    def swap(self, given: Load) -> "Future[Tensor]":
        """Takes a bucket's gradients in; the mean of the last ones is what the future brings."""
        rooms = self._rooms.get(tuple(given.names)) or self._furnished(given)
        rooms.told.buffer.copy_(given.buffer)
        self._filled.append(rooms)
        return rooms.heard.future

    def depart(self) -> list[Load]:
        """All that was taken in, now that DDP has the last means; their futures wait for it."""
        # Buckets that DDP has given up are not among them.
        self._rooms = {tuple(rooms.told.names): rooms for rooms in self._filled}
        self._filled, self._loaded = [], {}
        for rooms in self._rooms.values():
            rooms.heard, rooms.told = rooms.told._replace(future=self._future()), rooms.heard
        return [rooms.heard for rooms in self._rooms.values()]

    def rescale(self, factor: float) -> None:
        """Brings what has arrived to other units."""
        for mean in self.means().values():
            mean.mul_(factor)

    def means(self) -> State:
        """What has arrived, by parameter; none before the first step."""
        loads = [rooms.heard for rooms in self._rooms.values()]
        return by_name(loads) if loads else self._loaded

    def save(self) -> State:
        return {name: mean.clone() for name, mean in self.means().items()}

    def load(self, means: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Goes on where `save` was asked."""
        if means and means.keys() != tensors.keys():
            odd = sorted(means.keys() ^ tensors.keys())
            raise ConfigError(f"state: late means are of other parameters: {odd}")
        self._rooms, self._filled = {}, []
        self._loaded = {n: m.to(tensors[n].device, copy=True) for n, m in means.items()}

    def _furnished(self, given: Load) -> _Rooms:
        means, (heard, told) = self.means(), (_room(given, self._future()) for _ in range(2))
        if means:
            for name, place in zip(heard.names, heard.gradients, strict=True):
                place.copy_(means[name])
        heard.future.set_result(heard.buffer)
        return _Rooms(heard, told)


def by_name(loads: Iterable[Load]) -> State:
    return {n: g for load in loads for n, g in zip(load.names, load.gradients, strict=True)}


def _room(like: Load, future: "Future[Tensor]") -> Load:
    """Zeros in the form of a bucket."""
    buffer = torch.zeros_like(like.buffer)
    start = like.buffer.storage_offset()
    gradients = [
        buffer.as_strided(grad.shape, grad.stride(), grad.storage_offset() - start)
        for grad in like.gradients
    ]
    return Load(like.names, gradients, buffer, future)
