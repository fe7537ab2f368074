"""Statistics whose mean over ranks travels with the messages of a bucket.

Controllers must decide the same on every rank, so they see averaged numbers only. These numbers
join a collective that is made anyway, in the first round in which all of them are known. Where no
collective can take them (sums in 16 bits, collectives of some ranks only) they get a small one.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from gradwire.types import AllGather, AllToAll, Answer, Field, Layout, Mean, Request

STATISTICS = -2
"""Key of the statistics among the requests of a bucket's lanes."""


class Piggyback:
    """The statistics of one bucket: this rank's own, then their mean over ranks."""

    def __init__(self, numbers: Callable[[], Tensor | None], world_size: int) -> None:
        self._numbers, self._world_size = numbers, world_size
        self._sent = False
        self.mean: Tensor | None = None

    def requests(self, others: Collection[Request]) -> dict[int, Request]:
        """Returns the request to add to this round; none before the numbers are known."""
        if self._sent or not others:
            return {}
        numbers = self._numbers()
        if numbers is None:
            return {}
        self._sent = True
        return {STATISTICS: _matching_request(numbers, others, self._world_size)}

    def receive(self, answer: Answer) -> None:
        self.mean = torch.stack([parts[0] for parts in answer]).mean(0)


def _matching_request(numbers: Tensor, others: Collection[Request], world_size: int) -> Request:
    """Returns a request that shares a collective with the others, or one of its own."""
    layout = Layout((Field(torch.float32, numbers.numel()),))
    global_requests = [request for request in others if request.scope is None]
    for request in global_requests:
        if isinstance(request, AllToAll):
            return AllToAll([(numbers,)] * world_size, [layout] * world_size, request.rank)
    sums = [part for r in global_requests if isinstance(r, Mean) for part in r.parts]
    gathers = any(isinstance(request, AllGather) for request in global_requests)
    # A float32 part would widen 16-bit sums that share its collective.
    if gathers or any(part.dtype != torch.float32 for part in sums):
        return AllGather((numbers,), layout, [layout] * world_size)
    return Mean((numbers,))
