"""A few numbers whose mean over ranks all ranks learn, along with the messages of a bucket.

What a controller decides must be the same on every rank, so it may look at agreed numbers only.
They travel in the first round in which all of them are known, by a call that is made anyway. Where
there is none that can take them (sums in 16 bits, calls of some ranks only) they make a small one.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from gradwire.types import AllGather, AllToAll, Answer, Field, Layout, Mean, Request

CENSUS = -2
"""Its place among the lanes."""


class Piggyback:
    """One bucket's numbers: this rank's own, then the mean over all ranks."""

    def __init__(self, numbers: Callable[[], Tensor | None], size: int) -> None:
        self._numbers, self._size = numbers, size
        self._told = False
        self.agreed: Tensor | None = None

    def asks(self, beside: Collection[Request]) -> dict[int, Request]:
        """What goes out in a round beside these; nothing before the numbers are known."""
        if self._told or not beside:
            return {}
        numbers = self._numbers()
        if numbers is None:
            return {}
        self._told = True
        return {CENSUS: _like(numbers, beside, self._size)}

    def hears(self, answer: Answer) -> None:
        self.agreed = torch.stack([parts[0] for parts in answer]).mean(0)


def _like(numbers: Tensor, beside: Collection[Request], size: int) -> Request:
    """The numbers by a call that these make; by one of their own where that cannot be."""
    layout = Layout((Field(torch.float32, numbers.numel()),))
    everybody = [request for request in beside if request.scope is None]
    for request in everybody:
        if isinstance(request, AllToAll):
            return AllToAll([(numbers,)] * size, [layout] * size, request.rank)
    sums = [part for r in everybody if isinstance(r, Mean) for part in r.parts]
    gathers = any(isinstance(request, AllGather) for request in everybody)
    # A wider type than theirs would widen all that goes by the same call.
    if gathers or any(part.dtype != torch.float32 for part in sums):
        return AllGather((numbers,), layout, [layout] * size)
    return Mean((numbers,))
