"""Detection of non-finite gradients: a flag per bucket that all ranks agree on.

If a gradient is infinite or NaN on any rank, the step must be skipped on every rank. The flag
travels with the messages of the bucket's first round, without a collective of its own. Most
methods yield a non-finite value in their first message if the input has one, so the guard checks
that short message; otherwise it checks the gradient. An aggregation that tolerates faulty ranks
tolerates as many flags, or a faulty rank could stop all others by raising it.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite

import torch
from torch import Tensor

from gradwire.types import AllGather, AllToAll, Answer, Field, IntraNode, Layout, Mean, Request
from gradwire.wire.layout import adjacent, join

log = logging.getLogger("gradwire")

GUARD = -1
"""Key of the guard's flag among the requests of a bucket's lanes."""

FLAG = Layout((Field(torch.uint8, 1),))

LARGE = 1 << 16
"""Tensors of at least this many entries are checked in place; smaller ones are concatenated."""


class NonFiniteGuard:
    """The non-finite flag of one bucket: this rank's own, then that of all ranks."""

    def __init__(
        self,
        grads: Sequence[Tensor],
        propagates: Sequence[bool] = (),
        tolerated: int = 0,
        repair: Callable[[], None] | None = None,
    ) -> None:
        """`propagates[i]`: the first message of lane i is non-finite if its gradient is.

        `repair` runs at the end, before gradients are poisoned.
        """
        self._grads, self._repair, self._tolerated = grads, repair, tolerated
        self._propagating = {lane for lane, yes in enumerate(propagates) if yes}
        self._sent = False

    def begin(self) -> None:
        """Checks the gradients of the lanes that do not propagate non-finite values."""
        grads = enumerate(self._grads)
        unchecked = [grad.detach() for lane, grad in grads if lane not in self._propagating]
        self.flag = _nonfinite(unchecked, self._grads[0].device)  # [1], bool

    def requests(self, others: Mapping[int, Request]) -> dict[int, Request]:
        """Returns the request of the flag, which shares a collective with the others."""
        self._check_messages(others)
        if self._sent:
            return {}
        for request in others.values():
            own = self._matching_request(request)
            if own is not None:
                # A flag exchanged inside a node has yet to reach the other nodes.
                self._sent = not isinstance(request.scope, IntraNode)
                return {GUARD: own}
        return {}

    def _check_messages(self, requests: Mapping[int, Request]) -> None:
        """Checks the first messages of the lanes that propagate non-finite values."""
        if self._propagating:
            first = [_floats(r) for lane, r in requests.items() if lane in self._propagating]
            self._propagating = set()
            self.flag = self.flag | _nonfinite([*chain(*first)], self.flag.device)

    def _matching_request(self, request: Request) -> Request | None:
        if isinstance(request, Mean) and any(part.numel() for part in request.parts):
            # A wider type would widen everything that shares the collective.
            return Mean((self.flag.to(request.parts[0].dtype),), request.scope)
        flag = (self.flag.to(torch.uint8),)
        if isinstance(request, AllGather):
            return AllGather(flag, FLAG, [FLAG] * len(request.layouts), request.scope)
        if isinstance(request, AllToAll):
            size = len(request.layouts)
            return AllToAll([flag] * size, [FLAG] * size, request.rank, request.scope)
        return None

    def receive(self, answer: Answer) -> None:
        """Sets the flag if more ranks raised it than are tolerated."""
        flags = torch.cat([parts[0] for parts in answer]) != 0
        # A mean does not show how many ranks raised it, so none is tolerated there.
        self.flag = (flags.sum() > (self._tolerated if len(answer) > 1 else 0)).view(1)

    def finish(self) -> None:
        """Puts NaN into the first entry of each gradient if the flag is set, without a sync."""
        if self._repair is not None:
            self._repair()
        if self.flag.device.type == "cpu" and not self.flag:
            return
        # 0 / 0 or 0 / 1: selecting between two constants would copy them from the host.
        finite = (~self.flag).to(torch.float32).squeeze()
        nan_or_zero = torch.zeros_like(finite) / finite
        firsts = [grad[(slice(1),) * grad.dim()] for grad in self._grads if grad.numel()]
        if firsts:
            # One tensor per gradient: a shared scalar would be read by the host.
            torch._foreach_add_(
                firsts, [nan_or_zero.to(f.dtype).as_strided(f.shape, f.stride()) for f in firsts]
            )


class StepVerdict:
    """Collects the flags of a step's buckets; the host reads the result when it asks."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []
        self._bad: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._closed = False

    @property
    def pending(self) -> bool:
        """True if the host would have to wait for the GPU."""
        return self._copied is not None

    def add(self, flag: Tensor) -> None:
        self._flags.append(flag)

    def close(self) -> None:
        """Ends the step; on a GPU the result starts its way to the host asynchronously."""
        self._closed = True
        if not self._flags:
            return
        bad = torch.cat(self._flags).any()
        self._flags = []
        if bad.is_cuda:
            self._bad = torch.empty(1, dtype=torch.bool, pin_memory=True)
            self._bad.copy_(bad.view(1), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(bad.device))
        else:
            self._bad = bad

    def take(self) -> bool | None:
        """Returns whether the closed step had a non-finite gradient, once; None if none is due."""
        if not self._closed:
            return None
        if self._copied is not None:
            self._copied.synchronize()
        bad = self._bad is not None and bool(self._bad)
        self._closed, self._bad, self._copied = False, None, None
        return bad


class SkippedSteps:
    """Counts skipped steps, and logs the 1st, 2nd, 4th, 8th ... in a row."""

    def __init__(self) -> None:
        self.total = 0
        self._in_a_row = 0

    def add(self, step: int) -> str:
        """Counts one more; returns the text for the log or an exception."""
        self.total += 1
        self._in_a_row += 1
        text = f"a gradient of step {step} is not finite on some rank; the step is skipped"
        number = self._in_a_row
        if number & (number - 1) == 0:
            log.warning(text + (f" ({number} times in a row)" if number > 1 else ""))
        return text

    def end(self) -> None:
        """Ends a series of skipped steps; logs its length if some lines were left out."""
        if self._in_a_row > 2:
            log.warning("gradients are finite again after %d steps", self._in_a_row)
        self._in_a_row = 0


def _floats(request: Request) -> Iterable[Tensor]:
    """Returns the floating-point parts of a request."""
    messages = request.messages if isinstance(request, AllToAll) else [request.parts]
    return (part for parts in messages for part in parts if part.is_floating_point())


def _nonfinite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns whether any entry is infinite or NaN, in one pass and without a GPU sync."""
    some = [tensor for tensor in tensors if tensor.numel()]
    if device.type == "cpu":
        # Not concatenated first: that takes longer than checking small tensors one by one.
        extremes = chain.from_iterable(torch.aminmax(tensor) for tensor in some)
        return torch.tensor([not all(map(isfinite, extremes))])
    return _nonfinite_on_device(some) if some else torch.zeros(1, dtype=torch.bool, device=device)


def _nonfinite_on_device(tensors: Sequence[Tensor]) -> Tensor:
    if adjacent(tensors):
        pieces = [join(tensors)]
    else:
        small = [tensor for tensor in tensors if tensor.numel() < LARGE]
        pieces = [t for t in tensors if t.numel() >= LARGE] + ([join(small)] if small else [])
    # Minimum and maximum are cheaper than a test of every entry, and NaN is both of them.
    extremes = torch.stack([x.float() for piece in pieces for x in torch.aminmax(piece)])
    # x - x is 0, or NaN (which counts as true) if x is not finite.
    return (extremes - extremes).any().view(1)
