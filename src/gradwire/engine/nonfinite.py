"""Detection of non-finite values: a flag per bucket that all ranks agree on.

If a gradient is infinite or NaN on any rank, the step must be skipped on every rank. So must a step
in which finite gradients overflow when they are summed, or a message was corrupted on the way: what
is received may become state (the residual of a shard's mean, the factors of a low-rank method, the
mean that EF21 keeps), and would stay there. Every rank checks what it encodes, what it sends, what
it receives and what it will keep, and its flag travels with the messages of each round, without a
collective of its own. So what a round brings is known to all ranks after the next one. What the
last round brings is judged by each rank alone:

- A sum, and state that is computed from it, is the same on all ranks, and so is their verdict.
- A message whose sender reported that it was finite, but which is not, was corrupted on the way.
  Other ranks may have received it intact, so this rank must not go on without them: WireError.
  The same holds for a mean that cannot have overflowed, since this rank's part of it is far from
  the largest number: if a mean of numbers of at most M is about M, then each of them is.

Most methods yield a non-finite value in their first message if the input has one, so the guard
checks that short message; otherwise it checks what the message leaves of the input, or the input.
An aggregation that tolerates faulty ranks tolerates as many flags and non-finite messages, or a
faulty rank could stop all others.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from gradwire.types import AllGather, AllToAll, Answer, Field, Layout, Mean, Parts, Request
from gradwire.wire.layout import adjacent, join

log = logging.getLogger("gradwire")

Flag: TypeAlias = Tensor | bool
"""A condition: for a GPU a tensor of one entry, which the host does not read; for a CPU a bool,
since an operation on a tiny tensor takes as long as the check of a short message."""

GUARD = -1
"""Key of the guard's flag among the requests of a bucket's lanes."""

FLAG = Layout((Field(torch.uint8, 1),))

LARGE = 1 << 16
"""On a GPU tensors of at least this many entries are checked in place, others concatenated."""

LARGE_ON_HOST = 1 << 12
"""The same on a CPU, where it takes a tenth of the time of checking small ones one by one."""

OVERFLOW_RANGE = 0.5
"""A mean can overflow only if each rank's part exceeds this share of the largest number.

By the rounding errors of the sum alone every part would have to be close to 1.
"""


class GuardedLane(Protocol):
    """The part of a lane that the guard reads."""

    @property
    def propagates_nonfinite(self) -> bool:
        """True if a non-finite input always yields a non-finite value in the first message."""

    @property
    def keeps_mean(self) -> bool:
        """True if the memory keeps the mean that all ranks receive."""

    def encoded_input(self) -> Tensor:
        """Returns what the first message left of the input, or the input if that is not kept."""

    def replaced_state(self) -> list[Tensor]:
        """Returns the tensors that this step has put into the aggregator's pending state."""


class NonFiniteGuard:
    """The non-finite flag of one bucket: this rank's own, then that of all ranks."""

    def __init__(
        self,
        grads: Sequence[Tensor],
        lanes: Sequence[GuardedLane],
        tolerated: int = 0,
        repair: Callable[[], None] | None = None,
    ) -> None:
        """`repair` runs at the end, before gradients are poisoned."""
        self._grads, self._lanes, self._repair = grads, lanes, repair
        self._tolerated = tolerated
        self._device = grads[0].device if grads else torch.device("cpu")
        self._checked: set[int] = set()
        self._is_first_round = True

    def begin(self) -> None:
        """Starts with no flag. Not in `__init__`, which no CUDA graph captures."""
        none: Flag = False
        if self._device.type != "cpu":
            none = torch.zeros(1, dtype=torch.bool, device=self._device)
        self._bad_sum = self._bad_message = self._lost = none
        self._sent_range = self._range([])
        """The largest magnitude in this rank's part of the last round's sums, see `_range`."""
        self.flag = none
        """True if the step must be skipped, as far as this rank knows."""
        self.corrupted = none
        """True if this rank alone may know that the step cannot count; valid after `finish`."""

    def requests(self, others: Mapping[int, Request]) -> dict[int, Request]:
        """Checks what this rank is about to send; returns the request of its flag.

        The flag shares a collective with the others.
        """
        self.flag = self._known_flag() | self._nonfinite_own(others)
        for request in others.values():
            own = self._matching_request(request)
            if own is not None:
                return {GUARD: own}
        return {}

    def _known_flag(self) -> Flag:
        """Returns the flag with what this rank alone has found since it was exchanged."""
        return self.flag | self._bad_sum | self._bad_message | self._lost

    def _nonfinite_own(self, requests: Mapping[int, Request]) -> Flag:
        """Returns whether what this rank sends in this round, or will keep, is not finite."""
        own = self._new_state(requests)
        if self._is_first_round:
            self._is_first_round = False
            own += [x.encoded_input() for x in self._lanes if not x.propagates_nonfinite]
        sums: list[Tensor] = []
        for request in requests.values():
            (sums if isinstance(request, Mean) else own).extend(_floats(_messages(request)))
        self._sent_range = self._range(sums)
        return _is_nonfinite(self._sent_range) | _is_nonfinite(self._range(own))

    def _new_state(self, requests: Mapping[int, Request]) -> list[Tensor]:
        """Returns the aggregators' pending state that neither was checked nor is in a message."""
        found: list[Tensor] = []
        for number, lane in enumerate(self._lanes):
            replaced = lane.replaced_state()
            if not replaced:
                continue
            new = [x for x in replaced if id(x) not in self._checked]
            # Pending state keeps them alive until the step ends: no other tensor has their ids.
            self._checked.update(map(id, new))
            if not (lane.propagates_nonfinite and number in requests):
                found += [x for x in new if x.is_floating_point()]
        return found

    def _matching_request(self, request: Request) -> Request | None:
        if isinstance(request, Mean) and any(part.numel() for part in request.parts):
            # A wider type would widen everything that shares the collective.
            return Mean((self._flag_as(request.parts[0].dtype),), request.scope)
        if isinstance(request, AllGather):
            flag = (self._flag_as(torch.uint8),)
            return AllGather(flag, FLAG, [FLAG] * len(request.layouts), request.scope)
        if isinstance(request, AllToAll):
            size, flag = len(request.layouts), (self._flag_as(torch.uint8),)
            return AllToAll([flag] * size, [FLAG] * size, request.rank, request.scope)
        return None

    def _flag_as(self, dtype: torch.dtype) -> Tensor:
        if isinstance(self.flag, Tensor):
            return self.flag.to(dtype)
        return torch.ones(1, dtype=dtype) if self.flag else torch.zeros(1, dtype=dtype)

    def receive(
        self, flags: Answer | None, requests: Mapping[int, Request], answers: Mapping[int, Answer]
    ) -> None:
        """Sets the flag if more ranks raised it than are tolerated, and checks all messages."""
        sums: list[Tensor] = []
        messages: list[Answer] = []
        for lane, request in requests.items():
            if isinstance(request, Mean):
                sums += _floats(answers[lane])
            else:
                messages.append(answers[lane])
        bad_sum, bad_message = _is_nonfinite(self._range(sums)), self._bad_messages(messages)
        if flags is None:
            # The flag could not travel in this round: what was found before is still to be sent.
            self._bad_sum = self._bad_sum | bad_sum
            self._bad_message = self._bad_message | bad_message
            return
        self._bad_sum, self._bad_message = bad_sum, bad_message
        raised = self._count([parts[0] for parts in flags])
        # Ranks of a node send the flag of one of them: the others hold the same values, unless
        # these were corrupted on the way to them.
        self._lost = (raised == 0) & self.flag
        # A mean does not show how many ranks raised it, so none is tolerated there.
        self.flag = raised > (self._tolerated if len(flags) > 1 else 0)

    def _bad_messages(self, messages: Sequence[Answer]) -> Flag:
        """Returns whether more messages than are tolerated hold a non-finite value."""
        if not self._tolerated:
            return _is_nonfinite(self._range([x for a in messages for x in _floats(a)]))
        senders = zip(*messages, strict=True)
        by_sender = [_is_nonfinite(self._range([*_floats(sender)])) for sender in senders]
        return self._count(by_sender) > self._tolerated

    def _count(self, flags: Sequence[Flag]) -> Tensor | int:
        """Returns how many of some flags are not zero."""
        if self._device.type == "cpu":
            # Comparing a tensor takes several times as long as reading its number.
            return sum(float(flag) != 0 for flag in flags)
        tensors = [flag for flag in flags if isinstance(flag, Tensor)]
        if not tensors:
            return torch.zeros(1, dtype=torch.int64, device=self._device)
        return (torch.cat(tensors) != 0).sum().view(1)

    def finish(self, means: Mapping[int, Tensor]) -> None:
        """Checks what lanes keep of the last round, and decides without a sync of a GPU.

        If the step must be skipped, puts NaN into the first entry of each gradient.
        """
        if self._repair is not None:
            self._repair()
        kept = self._new_state({})
        kept += [means[lane] for lane, own in enumerate(self._lanes) if own.keeps_mean]
        overflowed = self._sent_range >= OVERFLOW_RANGE
        corrupted = self._bad_message | self._lost | (self._bad_sum & _not(overflowed))
        self.corrupted = corrupted & _not(self.flag)
        self.flag = self._known_flag() | _is_nonfinite(self._range(kept))
        self._poison()

    def _poison(self) -> None:
        if self.flag is False:
            return
        # 0 / 0 or 0 / 1: selecting between two constants would copy them from the host.
        finite = 1 - self._flag_as(torch.float32).squeeze()
        nan_or_zero = torch.zeros_like(finite) / finite
        firsts = [grad[(slice(1),) * grad.dim()] for grad in self._grads if grad.numel()]
        if firsts:
            # One tensor per gradient: a shared scalar would be read by the host.
            torch._foreach_add_(
                firsts, [nan_or_zero.to(f.dtype).as_strided(f.shape, f.stride()) for f in firsts]
            )

    def _range(self, tensors: Sequence[Tensor]) -> Tensor | float:
        """Returns the largest magnitude as a share of the largest number of its type.

        It is not finite if any entry is infinite or NaN. One pass, and no sync of a GPU.
        """
        if self._device.type == "cpu":
            return _range_on_host(tensors) if tensors else 0.0
        some = [tensor for tensor in tensors if tensor.numel()]
        return _range_on_device(some) if some else torch.zeros(1, device=self._device)


class Verdict(NamedTuple):
    """The verdict on a step: both are False if it counts."""

    nonfinite: bool
    """All ranks skip the step."""
    corrupted: bool
    """This rank has received other values than its peers may have, so it must not go on."""


class StepVerdict:
    """Collects the flags of a step's buckets; the host reads the result when it asks."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []  # [2], bool
        self._on_host = Verdict(nonfinite=False, corrupted=False)
        self._result: Tensor | None = None  # [2], bool
        self._copied: torch.cuda.Event | None = None
        self._closed = False

    @property
    def pending(self) -> bool:
        """True if the host would have to wait for the GPU."""
        return self._copied is not None

    def add(self, nonfinite: Flag, corrupted: Flag) -> None:
        if isinstance(nonfinite, Tensor) and isinstance(corrupted, Tensor):
            self._flags.append(torch.cat([nonfinite, corrupted]))
        else:
            found = self._on_host
            self._on_host = Verdict(found[0] or bool(nonfinite), found[1] or bool(corrupted))

    def close(self) -> None:
        """Ends the step; on a GPU the result starts its way to the host asynchronously."""
        self._closed = True
        if not self._flags:
            return
        result = torch.stack(self._flags).any(dim=0)
        self._flags = []
        if not result.is_cuda:
            self._result = result
            return
        self._result = torch.empty(2, dtype=torch.bool, pin_memory=True)
        self._result.copy_(result, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(result.device))

    def take(self) -> Verdict | None:
        """Returns the verdict on the closed step, once; None if none is due."""
        if not self._closed:
            return None
        if self._copied is not None:
            self._copied.synchronize()
        found = self._on_host if self._result is None else Verdict(*self._result.tolist())
        self._on_host = Verdict(nonfinite=False, corrupted=False)
        self._closed, self._result, self._copied = False, None, None
        return found


class SkippedSteps:
    """Counts skipped steps, and logs the 1st, 2nd, 4th, 8th ... in a row.

    All ranks skip the same steps, so one of them `logs` and the others only do for debugging.
    """

    def __init__(self, *, logs: bool) -> None:
        self.total = 0
        self._level = logging.WARNING if logs else logging.DEBUG
        self._in_a_row = 0

    def add(self, step: int) -> str:
        """Counts one more; returns the text for the log or an exception."""
        self.total += 1
        self._in_a_row += 1
        text = f"a gradient of step {step} is not finite on some rank; the step is skipped"
        number = self._in_a_row
        if number & (number - 1) == 0:
            log.log(self._level, text + (f" ({number} times in a row)" if number > 1 else ""))
        return text

    def end(self) -> None:
        """Ends a series of skipped steps; logs its length if some lines were left out."""
        if self._in_a_row > 2:
            log.log(self._level, "gradients are finite again after %d steps", self._in_a_row)
        self._in_a_row = 0


def _is_nonfinite(magnitude: Tensor | float) -> Flag:
    return ~magnitude.isfinite() if isinstance(magnitude, Tensor) else not isfinite(magnitude)


def _not(flag: Flag) -> Flag:
    return ~flag if isinstance(flag, Tensor) else not flag


def _messages(request: Request) -> Sequence[Parts]:
    return request.messages if isinstance(request, AllToAll) else [request.parts]


def _floats(messages: Iterable[Parts]) -> Iterable[Tensor]:
    """Returns the floating-point parts of some messages."""
    return (part for parts in messages for part in parts if part.is_floating_point())


def _range_on_host(tensors: Sequence[Tensor]) -> float:
    pieces: list[Tensor] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        numel = tensor.numel()
        if numel >= LARGE_ON_HOST:
            pieces.append(tensor)
        elif numel:
            flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
            small.setdefault(tensor.dtype, []).append(flat)
    pieces += [torch.cat(some) for some in small.values()]
    largest = 0.0
    for piece in pieces:
        low, high = map(float, torch.aminmax(piece))
        magnitude = max(-low, high)
        # NaN is both the minimum and the maximum.
        if not isfinite(magnitude):
            return inf
        largest = max(largest, magnitude / torch.finfo(piece.dtype).max)
    return largest


def _range_on_device(tensors: Sequence[Tensor]) -> Tensor:
    if adjacent(tensors):
        pieces = [join(tensors)]
    else:
        small = [tensor for tensor in tensors if tensor.numel() < LARGE]
        pieces = [t for t in tensors if t.numel() >= LARGE] + ([join(small)] if small else [])
    # Minimum and maximum are cheaper than a test of every entry, and NaN is both of them.
    extremes = [
        (x / torch.finfo(piece.dtype).max).float() for piece in pieces for x in torch.aminmax(piece)
    ]
    return torch.stack(extremes).abs().amax().view(1)
