"""CSER: the part of an update that is not sent is applied locally, and reset periodically.

Xie, Zheng, Koyejo, Gupta, Li & Lin 2020, arXiv:2007.13221.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.base import Compressor
from gradwire.comm.base import CollectiveProgram
from gradwire.engine.engine import Engine
from gradwire.errors import NonFiniteError
from gradwire.local.base import (
    LocalNanPolicy,
    LocalSteps,
    check_nan_policy,
    drift_plan,
    message_ratio,
    overall_ratio,
)
from gradwire.local.psync import Aside, psync
from gradwire.local.state import float_copies, room_for
from gradwire.local.workers import Group
from gradwire.types import State, mix


class CSER(LocalSteps):
    """Workers x = common + e: updates are told in part, and every `sync_every` steps errors are.

    The optimiser's step p is whatever it has done to the parameters, so momentum is local: plain
    SGD inside is CSER, momentum (Nesterov's or heavy ball) is M-CSER. Of p a worker says C2(p), by
    `updates`: all subtract the mean of that from `common`, and each keeps what it did not say in
    its own error, e -= p - C2(p). Every `sync_every` steps e is reset: the mean of C1(e), by
    `errors`, moves into `common`, and e - C1(e) is left. So `common` is the same on all workers to
    the bit. Without `updates` nothing is told between resets: that is CSEA with `sync_every=1` and
    else CSER-PL, or local SGD with `errors="none"`. With `updates="none"` it is plain SGD.

    Two float32 copies of the parameters are kept, on a GPU three; `BlockCSER` keeps none. Evaluate
    in `averaged()`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        updates: Compressor | str | None,
        errors: Compressor | str,
        *,
        sync_every: int,
        exchange: str = "auto",
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
        nan_policy: LocalNanPolicy = "raise",
    ) -> None:
        LocalSteps.__init__(self, model, optimizer, sync_every, process_group, seed, broadcast)
        check_nan_policy("CSER", nan_policy)
        self._exchange, self._nan_policy = exchange, nan_policy
        # Each draws random numbers of its own.
        self._errors = self._open(errors, mix(seed, 1))
        self._updates = None if updates is None else self._open(updates, mix(seed, 2))
        self._common_part = float_copies(self.parameters)
        self._error = {n: torch.zeros_like(t) for n, t in self._common_part.items()}
        self._rooms: State = {}

    def settings(self) -> dict[str, object]:
        told = {"errors": self._errors.plan.describe()}
        return {**told, "updates": self._updates and self._updates.plan.describe()}

    def planned_ratio(self) -> float:
        """R of 1/R = 1/R_C2 + 1/(R_C1 H) for this model, tensors that go dense included."""
        updates = None if self._updates is None else message_ratio(self._updates)
        return overall_ratio(updates, message_ratio(self._errors), self.sync_every)

    def error(self) -> State:
        """What this worker alone has applied, by parameter."""
        return {n: e.view(self.parameters[n].shape) for n, e in self._error.items()}

    def _begin(self) -> None:
        for name, copy in float_copies(self.parameters).items():
            self._common_part[name].copy_(copy)

    def _step(self) -> None:
        update = self._update()
        is_reset = self.steps % self.sync_every == 0
        self.syncs += is_reset
        if self._updates is None:
            for name, step in update.items():
                self._error[name].sub_(step)
        if self._updates is not None or is_reset:
            try:
                self._peers.talk(self._talk(update, is_reset))
            except NonFiniteError:
                if self._updates is None:
                    # The next step tells again how far parameters are from the common part.
                    torch._foreach_zero_(list(self._error.values()))
                raise

    def _update(self) -> State:
        """How far the optimiser's step went: x before it - x after it."""
        update = {}
        for name, parameter in self.parameters.items():
            # Where the parameter was put, which in 16 bits is only near the sum.
            before = (self._common_part[name] + self._error[name]).to(parameter.dtype)
            room = room_for(self._rooms, name, self._error[name])
            update[name] = room.copy_(before).sub_(parameter.detach().reshape(-1))
        return update

    def _talk(self, update: State, is_reset: bool) -> CollectiveProgram[None]:
        if self._updates is not None:
            yield from self._tell_update(self._updates, update)
        if is_reset:
            yield from self._reset()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                both = self._common_part[name] + self._error[name]
                parameter.copy_(both.view(parameter.shape))

    def _tell_update(self, lanes: Engine, update: State) -> CollectiveProgram[None]:
        """p', r = PSync(p, C2); x -= p', e -= r."""
        left = yield from psync(lanes, update)
        for name, mean in update.items():
            self._common_part[name].sub_(mean)
            if name in left:
                self._error[name].sub_(left[name])

    def _reset(self) -> CollectiveProgram[None]:
        """e', e = PSync(e, C1); x += e' - e."""
        told = {name: error.clone() for name, error in self._error.items()}
        left = yield from psync(self._errors, told)
        for name, mean in told.items():
            self._common_part[name].add_(mean)
            if name in left:
                self._error[name].copy_(left[name])
            else:
                self._error[name].zero_()

    def _lanes(self) -> Sequence[Engine]:
        return [self._errors] if self._updates is None else [self._updates, self._errors]

    def _tensors(self) -> dict[str, State]:
        return {"common": self._common_part, "error": self._error}

    def _common(self) -> Mapping[str, Tensor]:
        return self._common_part

    def _open(self, compressor: Compressor | str, seed: int) -> Engine:
        rank, size, tensors = self._peers.rank, self._peers.size, self.parameters
        plan = drift_plan("CSER", compressor, Aside(), self._exchange, tensors.values(), size)
        return Engine(plan, tensors, rank, size, seed, self._nan_policy)
