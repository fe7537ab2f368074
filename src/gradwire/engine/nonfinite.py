"""Steps that do not count: how many there were, and a word about them in the log."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite

import torch
from torch import Tensor

from gradwire.types import AllGather, AllToAll, Answer, Field, IntraNode, Layout, Mean, Request
from gradwire.wire.layout import adjacent, join

ALARM = -1
"""Its place among the lanes."""

FLAG = Layout((Field(torch.uint8, 1),))

LARGE = 1 << 16
"""From so many entries on a tensor is looked at where it is; smaller ones are put together."""


class NonFiniteGuard:
    """One bucket's word: 1 where something is not finite, 0 where all is well."""

    def __init__(
        self, grads: Sequence[Tensor], propagates_nonfinite: Sequence[bool] = (), borne: int = 0
    ) -> None:
        """Looks at the gradients but those whose lane `propagates_nonfinite` in its first request how they are."""
        self.borne = borne
        self._shown = {lane for lane, shown in enumerate(propagates_nonfinite) if shown}
        hidden = [grad.detach() for lane, grad in enumerate(grads) if lane not in self._shown]
        self.raised = _not_finite(hidden, grads[0].device)  # [1], bool
        self._told = False

    def asks(self, beside: Mapping[int, Request]) -> dict[int, Request]:
        """What goes out in a round beside these: a request of their kind, if they make a call."""
        self._look(beside)
        for request in beside.values():
            asked = None if self._told else self._like(request)
            if asked is not None:
                # What a node's ranks have told each other has yet to be told to other nodes.
                self._told = not isinstance(request.scope, IntraNode)
                return {ALARM: asked}
        return {}

    def _look(self, requests: Mapping[int, Request]) -> None:
        """Looks at what is about to be said first."""
        shown = [_numbers(r) for lane, r in requests.items() if lane in self._shown]
        self._shown = set()
        if shown:
            self.raised = self.raised | _not_finite([*chain(*shown)], self.raised.device)

    def _like(self, request: Request) -> Request | None:
        """The word to those whom a request goes to, by the same call."""
        if isinstance(request, Mean) and any(part.numel() for part in request.parts):
            # A wider type than theirs would widen all that goes by the same call.
            return Mean((self.raised.to(request.parts[0].dtype),), request.scope)
        flag = (self.raised.to(torch.uint8),)
        if isinstance(request, AllGather):
            return AllGather(flag, FLAG, [FLAG] * len(request.layouts), request.scope)
        if isinstance(request, AllToAll):
            size = len(request.layouts)
            return AllToAll([flag] * size, [FLAG] * size, request.rank, request.scope)
        return None

    def hears(self, answer: Answer) -> None:
        """Raised by one, or by more than are borne, is raised for all."""
        flags = torch.cat([parts[0] for parts in answer]) != 0
        # A mean does not tell how many they are, so there none is borne.
        self.raised = (flags.sum() > (self.borne if len(answer) > 1 else 0)).view(1)

    def spoil(self, grads: Sequence[Tensor]) -> None:
        """Puts NaN into each gradient's first entry where the alarm is raised; asks no device."""
        if self.raised.device.type == "cpu" and not self.raised:
            return
        # 0 / 0 or 0 / 1: a choice between two numbers would bring them from the host.
        calm = (~self.raised).to(torch.float32).squeeze()
        poison = torch.zeros_like(calm) / calm
        firsts = [grad[(slice(1),) * grad.dim()] for grad in grads if grad.numel()]
        if firsts:
            # As many tensors of their form: one for all of them would be read by the host.
            torch._foreach_add_(
                firsts, [poison.to(f.dtype).as_strided(f.shape, f.stride()) for f in firsts]
            )


class StepVerdict:
    """Whether the talks of a step raised an alarm; known to the host when it asks."""

    def __init__(self) -> None:
        self._alarms: list[Tensor] = []
        self._bad: Tensor | None = None
        self._known: torch.cuda.Event | None = None
        self._closed = False

    @property
    def late(self) -> bool:
        """Whether the host would have to wait for it."""
        return self._known is not None

    def add(self, alarm: Tensor) -> None:
        self._alarms.append(alarm)

    def close(self) -> None:
        """No more talks; on a GPU the answer sets out for the host, which need not wait."""
        self._closed = True
        if not self._alarms:
            return
        bad = torch.cat(self._alarms).any()
        self._alarms = []
        if bad.is_cuda:
            self._bad = torch.empty(1, dtype=torch.bool, pin_memory=True)
            self._bad.copy_(bad.view(1), non_blocking=True)
            self._known = torch.cuda.Event()
            self._known.record(torch.cuda.current_stream(bad.device))
        else:
            self._bad = bad

    def take(self) -> bool | None:
        """The verdict of a closed step, once; None where none is due."""
        if not self._closed:
            return None
        if self._known is not None:
            self._known.synchronize()
        bad = self._bad is not None and bool(self._bad)
        self._closed, self._bad, self._known = False, None, None
        return bad


def _numbers(request: Request) -> Iterable[Tensor]:
    """What a request says in floating point."""
    messages = request.messages if isinstance(request, AllToAll) else [request.parts]
    return (part for parts in messages for part in parts if part.is_floating_point())


def _not_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether any entry is infinite or NaN, in one pass and without asking a GPU."""
    some = [tensor for tensor in tensors if tensor.numel()]
    if device.type == "cpu":
        # Not put together first: that takes longer than looking at small ones.
        ends = chain.from_iterable(torch.aminmax(tensor) for tensor in some)
        return torch.tensor([not all(map(isfinite, ends))])
    return _unasked(some) if some else torch.zeros(1, dtype=torch.bool, device=device)


def _unasked(tensors: Sequence[Tensor]) -> Tensor:
    """The same where the host does not learn what it is."""
    # Both ends of the range: cheaper than looking at every entry, and NaN is both of them.
    ends = torch.stack([end.float() for piece in _pieces(tensors) for end in torch.aminmax(piece)])
    # Zero, but NaN for what is not finite, which counts as true.
    return (ends - ends).any().view(1)


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same entries in few tensors, without a copy of the large ones."""
    if adjacent(tensors):
        return [join(tensors)]
    small = [tensor for tensor in tensors if tensor.numel() < LARGE]
    return [t for t in tensors if t.numel() >= LARGE] + ([join(small)] if small else [])


log = logging.getLogger("gradwire")


class SkippedSteps:
    """Counts them, and says so of the 1st, 2nd, 4th, 8th ... in a row."""

    def __init__(self) -> None:
        self.total = 0
        self._in_a_row = 0

    def add(self, step: int) -> str:
        """One more; returns what is to be said of it."""
        self.total += 1
        self._in_a_row += 1
        text = f"a gradient of step {step} is not finite on some rank; it does not count"
        number = self._in_a_row
        if number & (number - 1) == 0:
            log.warning(text + (f" ({number} times in a row)" if number > 1 else ""))
        return text

    def end(self) -> None:
        """A step counts again."""
        # Who saw few lines of many should know how many there would have been.
        if self._in_a_row > 2:
            log.warning("gradients are finite again after %d steps", self._in_a_row)
        self._in_a_row = 0
