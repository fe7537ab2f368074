"""Accordion: compresses layers in critical regimes lightly, and all others strongly.

A layer is in a critical regime while the norm of its gradients changes fast between checks.
Agarwal et al. 2021, arXiv:2010.16248.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from gradwire.base import Compressor
from gradwire.checks import check_fraction, check_number, check_whole
from gradwire.control.base import (
    Controller,
    ControllerState,
    Log,
    Saved,
    Setting,
    StepReport,
    at_setting,
)
from gradwire.errors import ConfigError
from gradwire.spec import format_spec

Level: TypeAlias = Literal["low", "high"]


class Rule(Protocol):
    """What the pilot needs to know of its controller."""

    @property
    def eta(self) -> float: ...
    @property
    def interval(self) -> int: ...
    @property
    def epoch_steps(self) -> int: ...
    def passes(self) -> Mapping[str, int]: ...


@dataclass
class Known:
    """All that a checkpoint needs."""

    levels: dict[str, Level]
    norms: dict[str, float] = field(default_factory=dict)
    """At the last check."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """This rank's gradients of the epoch so far, where there is a check at its end."""
    epoch: int = 0
    in_epoch: int = 0
    """Steps of the epoch so far, or backward passes where these are accumulated."""
    due: int = -1
    """The step after which an epoch ended whose check is still due; -1 where none is."""
    decayed: int = -1
    """The step after which the learning rate was last lowered."""
    rate: float | None = None


class Regimes(ControllerState):
    """Norms are told along with the first step after an epoch; their check counts from the next."""

    def __init__(
        self,
        rule: Rule,
        levels: Mapping[str, Compressor],
        names: Sequence[str],
        old: ControllerState | None,
    ) -> None:
        self._rule = rule
        self._orders = {level: Setting(compressor) for level, compressor in levels.items()}
        self.known = Known(dict.fromkeys(names, "low"))
        self.log = Log() if old is None else old.log
        self._drafts: dict[str, Tensor] = {}
        self._told: dict[str, Tensor] = {}
        if isinstance(old, Regimes):
            # What was seen of raw gradients holds whatever the method.
            known = {name: old.known.levels.get(name, "low") for name in names}
            self.known = replace(old.known, levels=known)
        reason = "all layers start low" if old is None else "another method, levels stay"
        self._note(self.log.now, reason)

    @property
    def asks(self) -> bool:
        return self.known.due >= 0

    @property
    def measures(self) -> bool:
        return self.asks

    def order(self, name: str) -> Setting:
        return self._orders[self.known.levels[name]]

    def listen(self, name: str, grad: Tensor, scale: float) -> None:
        known = self.known
        last = known.sums.get(name)
        if self.asks:
            zero = torch.zeros((), device=grad.device)
            self._told[name] = zero if last is None else last.norm()
            last = None
        if known.epoch % self._rule.interval == 0:
            flat = grad.detach().to(torch.float32).reshape(-1)
            room = torch.zeros_like(flat) if last is None else last
            self._drafts[name] = torch.add(room, flat, alpha=self._passes() / scale)

    def tell(self, names: Sequence[str]) -> list[Tensor] | None:
        return [self._told[name] for name in names]

    def step(self, heard: StepReport) -> None:
        known = self.known
        known.in_epoch += self._passes()
        if self.asks:
            self._check(heard)
            known.due = -1
            known.sums = {}
        known.sums = {**known.sums, **self._drafts}
        self.skip()
        if 0 < self._rule.epoch_steps <= known.in_epoch:
            self._end_epoch(heard.step)

    def skip(self) -> None:
        self._drafts, self._told = {}, {}

    def _check(self, heard: StepReport) -> None:
        """Compares the norms of this epoch with those of the check before."""
        known = self.known
        told = [pair for names, values in heard.numbers for pair in zip(names, values, strict=True)]
        decays = known.decayed >= known.due
        changes = []
        for name, norm in told:
            if norm == 0 or not math.isfinite(norm):
                # Gradients that are zero or not finite say nothing about a layer.
                continue
            change = _change(known.norms.get(name), norm)
            changes.append(change)
            critical = decays or change >= self._rule.eta
            known.levels[name] = "low" if critical else "high"
            known.norms[name] = norm
        reason = f"norms changed by up to {max(changes, default=0):.2g}, eta {self._rule.eta:g}"
        self._note(heard.step, "the learning rate was lowered" if decays else reason)

    def epoch(self, step: int, learning_rate: float | None) -> None:
        if not self._rule.epoch_steps:
            self._end_epoch(step)
        if learning_rate is not None:
            if self.known.rate is not None:
                self.rate_changed(step, self.known.rate, learning_rate)
            self.known.rate = learning_rate

    def _end_epoch(self, step: int) -> None:
        if self.known.epoch % self._rule.interval == 0:
            self.known.due = step
        self.known.epoch += 1
        self.known.in_epoch = 0

    def rate_changed(self, step: int, before: float, after: float) -> None:
        if after < before:
            self.known.decayed = step
            self.known.levels = dict.fromkeys(self.known.levels, "low")
            self._note(step, "the learning rate was lowered")
        self.known.rate = after

    def _note(self, step: int, reason: str) -> None:
        levels = list(self.known.levels.values())
        self.log.add(step, f"low: {levels.count('low')} of {len(levels)} layers", reason)

    def save(self) -> Saved:
        sums = {name: tensor.clone() for name, tensor in self.known.sums.items()}
        plain = {"levels": dict(self.known.levels), "norms": dict(self.known.norms)}
        return {**vars(self.known), **plain, "sums": sums}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.known = Known(**saved)
        self.known = replace(
            self.known,
            levels=dict(self.known.levels),
            norms=dict(self.known.norms),
            sums={name: tensor.clone() for name, tensor in self.known.sums.items()},
        )
        self.skip()

    def explain(self) -> dict[str, object]:
        levels = self.known.levels
        return {
            "setting": {level: format_spec(o.compressor) for level, o in self._orders.items()},
            "levels": dict(levels),
            "norms": dict(self.known.norms),
            "epoch": self.known.epoch,
            "accumulate": self._passes(),
        }

    def _passes(self) -> int:
        """How many backward passes a step is the mean of, where the loop does as it is told."""
        levels = self.known.levels
        calm = levels and "low" not in levels.values()
        return self._rule.passes()["high" if calm else "low"]


def _change(old: float | None, new: float) -> float:
    """By what share of itself a norm has changed; infinite where there was none to compare with."""
    return abs(old - new) / old if old else math.inf


SHAPE = (1000, 1000)
"""The tensor on which both levels are compared."""


BATCH = "batch"
"""The setting that is the training loop's own."""


@dataclass(frozen=True)
class Accordion(Controller):
    """Sets `setting` to `low` in a layer's critical regimes, and to `high` elsewhere.

    `low` is little compression (a high ratio or rank), `high` is much. A layer is critical if the
    norm of its gradients' sum over an epoch differs by a share of `eta` at least from that
    `interval` epochs before; at the start all are, and after a decay of the learning rate until the
    next check. The sums are of each rank's own gradients, before compression and without residual,
    and the norms are averaged over ranks (the paper's code looks at one rank). Epochs are those
    that `epoch_ended` tells, or `epoch_steps` steps where that is set.

    A setting of "batch" steers nothing but the batch, by any method: `low` and `high` are backward
    passes to accumulate, those of `low` while any layer is critical. `accumulate_low` and
    `accumulate_high` are the same beside another setting. The training loop has to do it: it asks
    `stats()["controller"]["accumulate"]`, and gives the mean of so many passes' gradients, which
    counts as that many in the sums and towards `epoch_steps`.
    """

    low: float
    high: float
    setting: str = "ratio"
    eta: float = 0.5
    interval: int = 10
    epoch_steps: int = 0
    accumulate_low: int = 1
    accumulate_high: int = 1

    def __post_init__(self) -> None:
        check_number("accordion", "low", self.low)
        check_number("accordion", "high", self.high)
        check_fraction("accordion", "eta", self.eta)
        check_whole("accordion", "interval", self.interval, 1)
        check_whole("accordion", "epoch_steps", self.epoch_steps, 0)
        check_whole("accordion", "accumulate_low", self.accumulate_low, 1)
        check_whole("accordion", "accumulate_high", self.accumulate_high, self.accumulate_low)
        if self.setting == BATCH:
            self._check_batch()

    def _check_batch(self) -> None:
        if not (1 <= self.low < self.high and self.low % 1 == self.high % 1 == 0):
            got = f"{self.low!r} and {self.high!r}"
            raise ConfigError(f"accordion: batch: passes must be whole, 1 <= low < high, got {got}")
        if (self.accumulate_low, self.accumulate_high) != (1, 1):
            got = f"{self.accumulate_low!r} and {self.accumulate_high!r}"
            raise ConfigError(
                "accordion: batch: low and high say it, leave accumulate_low and accumulate_high "
                f"at 1, got {got}"
            )

    def passes(self) -> dict[str, int]:
        """Backward passes to accumulate, by level."""
        if self.setting == BATCH:
            return {"low": int(self.low), "high": int(self.high)}
        return {"low": self.accumulate_low, "high": self.accumulate_high}

    def pilot(
        self,
        compressor: Compressor,
        names: Sequence[str],
        size: int,
        old: ControllerState | None = None,
    ) -> ControllerState:
        if self.setting == BATCH:
            return Regimes(self, {"low": compressor, "high": compressor}, names, old)
        low, high = self.settings(compressor)
        if low.nbytes(SHAPE) <= high.nbytes(SHAPE):
            got = f"{self.low!r} and {self.high!r}"
            raise ConfigError(f"accordion: low must say more than high does, got {got}")
        return Regimes(self, {"low": low, "high": high}, names, old)

    def settings(self, compressor: Compressor) -> list[Compressor]:
        if self.setting == BATCH:
            return []
        return [at_setting(compressor, self.setting, value) for value in (self.low, self.high)]
