"""The base class of optimisers that exchange updates instead of gradients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.auto.auto import Auto
from gradwire.base import UpdateRule
from gradwire.engine.nonfinite import StepVerdict, Verdict
from gradwire.engine.plan import Plan
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from gradwire.integrations.ddp import Link, attach_planned, trained_parameters
from gradwire.integrations.settings import Settings, settings_of
from gradwire.memory.lowbit import LowBit
from gradwire.memory.none import NoMemory
from gradwire.memory.residual import Residual
from gradwire.optim.apply import apply_updates
from gradwire.optim.dense import MeanGradient, dense_step
from gradwire.optim.groups import check_groups, check_model
from gradwire.policies import MethodSpec
from gradwire.spec import format_spec

Groups: TypeAlias = Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None
"""Parameters, or groups of them as torch's optimisers take; None means all that DDP trains."""


class Exchange(NamedTuple):
    """The arguments of an optimiser that define how its updates are exchanged."""

    compress: MethodSpec | Auto | Settings
    process_group: dist.ProcessGroup | None
    scaler: torch.amp.GradScaler | None
    options: Mapping[str, object]


class CompressedOptimizer(torch.optim.Optimizer, ABC):
    """An optimiser of a DDP model whose workers exchange compressed updates during backward.

    After `backward` the gradient of a parameter holds the mean update over ranks, equal on all of
    them; `step` applies it with learning rate and decoupled weight decay, and clears it. A step in
    which a gradient is not finite on any rank is skipped on all of them, moments included.

    Without compression it is the dense optimiser: `backward` leaves the mean gradient, and `step`
    takes moments of that.
    """

    changeable: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")
    """Options of a group that may change at any step."""

    fixed_method: ClassVar[bool] = False
    """True if the method of compression is a part of the optimiser, so that `switch` is refused."""

    link: Link
    """The handle: `stats()`, `switch`, `detach` and so on, as of `gradwire.attach`."""

    # A GradScaler then leaves the skipped steps to us, and shows that it is in use.
    _step_supports_amp_scaling = True

    def __init__(
        self, model: DDP, groups: Groups, defaults: dict[str, Any], exchange: Exchange
    ) -> None:
        kind = type(self).__name__
        check_model(kind, model)
        settings = settings_of(exchange.compress, exchange.options)
        settings.refuse(kind, "controller")
        names = trained_parameters(model)
        self._fixed_keys = [key for key in defaults if key not in self.changeable]
        torch.optim.Optimizer.__init__(self, list(names) if groups is None else groups, defaults)
        check_groups(kind, self.param_groups, names)
        self._names = names
        group = exchange.process_group or model.process_group
        self._workers = dist.get_world_size(group)
        self._rules = self._current_rules()
        self._dense_rules = {name: rule.dense() for name, rule in self._rules.items()}
        self._fixed = self._fixed_options()
        self._scaler = exchange.scaler
        self._checks_finite = settings.nan_policy != "ignore"
        adapt: Callable[[Plan], Plan] = partial(
            update_plan,
            kind,
            rules=tuple(self._rules.items()),
            # The automatic mode changes methods between two steps, so moments stay local.
            may_be_dense=settings.auto() is None,
        )
        if self.fixed_method:
            adapt = partial(_same_plan, kind, adapt, [])
        self.link = attach_planned(
            # Nothing rescales the mean update, so sparse methods do not stall.
            model,
            settings,
            adapt,
            adaptive=False,
            process_group=exchange.process_group,
            scaler=exchange.scaler,
        )
        self._passes: int | None = None if self._is_dense() else 0
        """Passes at the last step; None if gradients were exchanged, which may be added up."""
        self._verdict = StepVerdict()
        # Where `handle_of` finds the handle; torch neither pickles nor copies it.
        vars(self)["gradwire"] = self.link

    @abstractmethod
    def rule(self, group: Mapping[str, Any], name: str, parameter: Tensor) -> UpdateRule:
        """Returns the update rule of a parameter, from the options of its group."""

    def _fixed_options(self) -> list[dict[str, Any]]:
        """Returns the options of every group that may not change."""
        return [{key: group[key] for key in self._fixed_keys} for group in self.param_groups]

    def _current_rules(self) -> dict[str, UpdateRule]:
        """Returns the rules in the order of the model's parameters."""
        found = {
            self._names[parameter]: self.rule(group, self._names[parameter], parameter)
            for group in self.param_groups
            for parameter in group["params"]
        }
        return {name: found[name] for name in self._names.values()}

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Applies the mean update, and clears it: gradients are None afterwards."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_ready()
        attributes = vars(self)
        scale, found_inf = attributes.get("grad_scale"), attributes.get("found_inf")
        if self._is_dense():
            self._dense_step(scale, found_inf)
        else:
            apply_updates(
                self.param_groups,
                check_finite=self._checks_finite,
                scale=scale,
                found_inf=found_inf,
            )
        self.zero_grad()
        return loss

    def _is_dense(self) -> bool:
        """Returns whether gradients are exchanged without compression, and hold their mean."""
        return self.link._engine.plan.updates_mean

    def _dense_step(self, scale: Tensor | None, found_inf: Tensor | None) -> None:
        lanes = self.link._engine.lanes
        groups = [
            (group, [self._with_mean(p, lanes[self._names[p]]) for p in group["params"]
                     if p.grad is not None])
            for group in self.param_groups
        ]  # fmt: skip
        skip = dense_step(
            groups, check_finite=self._checks_finite, scale=scale, found_inf=found_inf
        )
        if found_inf is None and self.link._engine.is_plain_mean():
            self._count_skipped(skip)

    def _with_mean(self, parameter: nn.Parameter, lane: Lane) -> MeanGradient:
        assert parameter.grad is not None
        rule = self._dense_rules[lane.name]
        return MeanGradient(parameter, parameter.grad, rule, lane.memory_state)

    def _count_skipped(self, skip: Tensor | None) -> None:
        """Counts and logs skipped steps; on a GPU one step later, without a wait of the host."""
        verdict, skipped = self._verdict.take(), self.link._engine.skipped
        if skip is not None and skip.is_cuda:
            self._verdict.add(skip.bool().view(1), torch.zeros_like(skip, dtype=torch.bool).view(1))
            self._verdict.close()
        elif skip is not None:
            verdict = Verdict(nonfinite=bool(skip), corrupted=False)
        if verdict is not None and verdict.nonfinite:
            self.link.stats()  # Counts the passes of DDP's own reducer.
            skipped.add(self.link._engine.steps())
        elif verdict is not None:
            skipped.end()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears updates and gradients."""
        if "gradwire" in vars(self):
            self._passes = None if self._is_dense() else self.link.passes()
        torch.optim.Optimizer.zero_grad(self, set_to_none)

    def _check_ready(self) -> None:
        """Raises ConfigError if what the gradients hold is not one mean update."""
        kind = type(self).__name__
        if "gradwire" not in vars(self) or not self.link._is_attached():
            raise ConfigError(
                f"{kind}: its link is detached, or this is a copy, so gradients are no updates; "
                "make the optimiser anew"
            )
        if self._passes is not None and self.link.passes() > self._passes + 1:
            raise ConfigError(
                f"{kind}: {self.link.passes() - self._passes} backward passes were exchanged since "
                "the last step, so gradients were added to updates; accumulate under the model's "
                "no_sync() in all passes but the last, or call the optimiser's zero_grad()"
            )
        if "found_inf" in vars(self) and self._scaler is None:
            raise ConfigError(
                f"{kind}: a GradScaler takes the step; moments need the unscaled gradients, so "
                "pass it as scaler="
            )
        if self._fixed_options() != self._fixed:
            raise ConfigError(
                f"{kind}: an option of the update has changed in param_groups, such as betas; only "
                "lr and weight_decay can (a OneCycleLR needs cycle_momentum=False)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the groups, and this rank's moments and residuals; called on all ranks."""
        return {**torch.optim.Optimizer.state_dict(self), "gradwire": self.link.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues exactly where this rank was saved; called on all ranks, each with its own."""
        if "gradwire" not in state_dict:
            raise ConfigError(
                f"{type(self).__name__}: the state has no moments of this rank; it is that of "
                "another optimiser"
            )
        groups = {key: value for key, value in state_dict.items() if key != "gradwire"}
        self._prepare_load(groups["param_groups"])
        self.link.load_state_dict(state_dict["gradwire"])
        # An empty state is left out of distributed checkpoints.
        torch.optim.Optimizer.load_state_dict(self, {"state": {}, **groups})

    def _prepare_load(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Prepares for the state of a run with these groups; by default there is nothing to do."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of the constructor; later it raises, since DDP's parameters are fixed."""
        if "gradwire" in vars(self):
            raise ConfigError(
                f"{type(self).__name__}: groups cannot be added; make the DDP model and the "
                "optimiser anew"
            )
        torch.optim.Optimizer.add_param_group(self, param_group)


def _same_plan(
    kind: str, adapt: Callable[[Plan], Plan], first: list[dict[str, object]], plan: Plan
) -> Plan:
    """Returns the adapted plan; raises ConfigError if it is not the one that was the first."""
    found = adapt(plan)
    if not first:
        first.append(found.identity())
    if found.identity() != first[0]:
        raise ConfigError(
            f"{kind}: the method of compression is part of the optimiser, which cannot switch it"
        )
    return found


def update_plan(
    kind: str, plan: Plan, rules: tuple[tuple[str, UpdateRule], ...], may_be_dense: bool = True
) -> Plan:
    """Returns a plan that sends updates; raises ConfigError for memories that do not suit them.

    Without compression gradients are sent, if it `may_be_dense`, and the rules take their mean.
    """
    for method in plan.methods:
        if isinstance(method.memory, Residual | LowBit | NoMemory):
            continue
        memory = format_spec(method.memory)
        raise ConfigError(
            f"{kind}: memory {memory!r} keeps momentum or a target, but updates have their moments "
            "already; use memory 'residual', 'lowbit' or 'none', or leave it out"
        )
    return replace(plan, rules=rules, updates_mean=may_be_dense and plan.is_dense)
