"""CSER: the part of an update that is not sent is applied locally, and reset periodically.

Xie, Zheng, Koyejo, Gupta, Li & Lin 2020, arXiv:2007.13221.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gradwire.comm.base import CollectiveProgram
from gradwire.engine.engine import Engine
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.local.base import (
    LocalMethod,
    LocalNanPolicy,
    check_nan_policy,
    drift_plan,
    message_ratio,
    overall_ratio,
)
from gradwire.local.island import forms_of, local_part
from gradwire.local.optimizers import Optimizers
from gradwire.local.psync import ReturnedResidual, psync
from gradwire.local.state import buffer_for, float_copies
from gradwire.local.workers import Group
from gradwire.policies import MethodSpec
from gradwire.spec import format_spec, name_of
from gradwire.types import State, mix


class CSER(LocalMethod):
    """Keeps a worker's parameters as x = common + e, and resets e every `sync_every` steps.

    The update p is whatever the optimiser's step has done to the parameters, so momentum is local:
    plain SGD inside is CSER, momentum (Nesterov's or heavy ball) is M-CSER. Of p a worker sends
    C2(p), compressed by `updates`: all subtract its mean from `common`, and each applies the rest
    to its own error, e -= p - C2(p). Every `sync_every` steps e is reset: the mean of C1(e),
    compressed by `errors`, moves into `common`, and e becomes e - C1(e). So `common` is bitwise
    equal on all workers. Without `updates` nothing is sent between resets: that is CSEA with
    `sync_every=1` and else CSER-PL, or local SGD with `errors="none"`. With `updates="none"` it is
    plain SGD.

    Two float32 copies of the parameters are kept, on a GPU three; `BlockCSER` keeps none. Evaluate
    in `averaged()`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        updates: MethodSpec | None,
        errors: MethodSpec,
        *,
        sync_every: int,
        exchange: str = "auto",
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
        nan_policy: LocalNanPolicy = "raise",
    ) -> None:
        LocalMethod.__init__(self, model, optimizer, sync_every, process_group, seed, broadcast)
        check_nan_policy("CSER", nan_policy)
        self._exchange, self._nan_policy = exchange, nan_policy
        # A shard may be too small for a method that another rank's is large enough for.
        with self._island.same_errors():
            # Each draws random numbers of its own.
            self._errors = self._make_engine(errors, mix(seed, 1))
            self._updates = None if updates is None else self._make_engine(updates, mix(seed, 2))
        self._common_part = float_copies(self.parameters)
        self._error = {n: torch.zeros_like(t) for n, t in self._common_part.items()}
        self._buffers: State = {}

    def settings(self) -> dict[str, object]:
        errors = {"errors": self._errors.plan.identity()}
        return {**errors, "updates": self._updates and self._updates.plan.identity()}

    def planned_ratio(self) -> float:
        """Returns R of 1/R = 1/R_C2 + 1/(R_C1 H) for this model, dense tensors included."""
        updates = None if self._updates is None else message_ratio(self._updates)
        return overall_ratio(updates, message_ratio(self._errors), self.sync_every)

    def error(self) -> State:
        """Returns the part of the parameters that only this worker has applied, by name.

        Of a sharded parameter it is that of this rank's part.
        """
        return {n: e.view(local_part(self.parameters[n]).shape) for n, e in self._error.items()}

    def _initialize(self) -> None:
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
                self._workers.run(self._sync(update, is_reset))
            except NonFiniteError:
                if self._updates is None:
                    # The next update is again the whole difference to the common part.
                    torch._foreach_zero_(list(self._error.values()))
                raise

    def _update(self) -> State:
        """Returns the optimiser's step: x before it - x after it."""
        update = {}
        for name, parameter in self.parameters.items():
            # Rounded as the parameter was, which in 16 bits is only near the sum.
            before = (self._common_part[name] + self._error[name]).to(parameter.dtype)
            error = self._error[name]
            buffer = buffer_for(self._buffers, name, error.numel(), error.device)
            update[name] = buffer.copy_(before).sub_(local_part(parameter).reshape(-1))
        return update

    def _sync(self, update: State, is_reset: bool) -> CollectiveProgram[None]:
        if self._updates is not None:
            yield from self._send_update(self._updates, update)
        if is_reset:
            yield from self._reset()
        for name, parameter in self.parameters.items():
            part = local_part(parameter)
            part.copy_((self._common_part[name] + self._error[name]).view(part.shape))

    def _send_update(self, engine: Engine, update: State) -> CollectiveProgram[None]:
        """Computes p', r = PSync(p, C2); x -= p', e -= r."""
        residuals = yield from psync(engine, update)
        for name, mean in update.items():
            self._common_part[name].sub_(mean)
            if name in residuals:
                self._error[name].sub_(residuals[name])

    def _reset(self) -> CollectiveProgram[None]:
        """Computes e', e = PSync(e, C1); x += e' - e."""
        errors = {name: error.clone() for name, error in self._error.items()}
        residuals = yield from psync(self._errors, errors)
        for name, mean in errors.items():
            self._common_part[name].add_(mean)
            if name in residuals:
                self._error[name].copy_(residuals[name])
            else:
                self._error[name].zero_()

    def _engines(self) -> Sequence[Engine]:
        return [self._errors] if self._updates is None else [self._updates, self._errors]

    def _tensors(self) -> dict[str, State]:
        return {"common": self._common_part, "error": self._error}

    def _common(self) -> Mapping[str, Tensor]:
        return self._common_part

    def _make_engine(self, compressor: MethodSpec, seed: int) -> Engine:
        rank, size, tensors = self._workers.rank, self._workers.size, forms_of(self.parameters)
        memory, exchange = ReturnedResidual(), self._exchange
        plan = drift_plan("CSER", compressor, memory, exchange, tensors, size)
        for method in plan.methods:
            if not (method.is_dense or isinstance(method.memory, ReturnedResidual)):
                raise ConfigError(
                    f"CSER: keeps what {format_spec(method.compressor)} does not send itself; "
                    f"leave memory {name_of(method.memory)!r} out of the policy"
                )
        return Engine(plan, tensors, rank, size, seed, self._nan_policy)
