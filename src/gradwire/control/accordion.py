"""Accordion: compresses layers in critical regimes lightly, and all others strongly.

A layer is in a critical regime while the norm of its gradients changes fast between checks.
Agarwal et al. 2021, arXiv:2010.16248.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from gradwire.base import Compressor
from gradwire.checks import check_number, check_positive_fraction, check_whole
from gradwire.control.base import (
    Controller,
    ControllerState,
    DecisionLog,
    Setting,
    StateDict,
    StepReport,
    at_setting,
)
from gradwire.errors import ConfigError
from gradwire.spec import format_spec

Level: TypeAlias = Literal["low", "high"]


@dataclass
class Regimes:
    """Everything that a checkpoint needs."""

    levels: dict[str, Level]
    norms: dict[str, float] = field(default_factory=dict)
    """Mean gradient norms at the last check."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums of this rank's gradients over the current epoch, if it ends with a check."""
    epoch: int = 0
    passes_in_epoch: int = 0
    """Backward passes of the epoch so far: steps, unless gradients are accumulated."""
    check_due: int = -1
    """The step after which an epoch ended whose check is still due; -1 if none is."""
    decayed_at: int = -1
    """The step after which the learning rate was last lowered."""
    learning_rate: float | None = None


class AccordionState(ControllerState):
    """Sends norms with the first step after an epoch; their check takes effect one step later."""

    def __init__(
        self,
        config: "Accordion",
        levels: Mapping[str, Compressor],
        names: Sequence[str],
        previous: ControllerState | None,
    ) -> None:
        self._config = config
        self._settings = {level: Setting(compressor) for level, compressor in levels.items()}
        self.regimes = Regimes(dict.fromkeys(names, "low"))
        self.log = DecisionLog() if previous is None else previous.log
        self._pending_sums: dict[str, Tensor] = {}
        self._local_norms: dict[str, Tensor] = {}
        if isinstance(previous, AccordionState):
            # Statistics of raw gradients do not depend on the method.
            known = {name: previous.regimes.levels.get(name, "low") for name in names}
            self.regimes = replace(previous.regimes, levels=known)
        reason = "all layers start at low" if previous is None else "new method, same levels"
        self._log_decision(self.log.start_step, reason)

    @property
    def wants_statistics(self) -> bool:
        return self.regimes.check_due >= 0

    @property
    def needs_measurement(self) -> bool:
        return self.wants_statistics

    def setting_for(self, name: str) -> Setting:
        return self._settings[self.regimes.levels[name]]

    def observe_gradient(self, name: str, grad: Tensor, scale: float) -> None:
        regimes = self.regimes
        last = regimes.sums.get(name)
        if self.wants_statistics:
            zero = torch.zeros((), device=grad.device)
            self._local_norms[name] = zero if last is None else last.norm()
            last = None
        if regimes.epoch % self._config.interval == 0:
            flat = grad.detach().to(torch.float32).reshape(-1)
            total = torch.zeros_like(flat) if last is None else last
            self._pending_sums[name] = torch.add(total, flat, alpha=self._accumulation() / scale)

    def local_statistics(self, names: Sequence[str]) -> list[Tensor] | None:
        return [self._local_norms[name] for name in names]

    def end_step(self, report: StepReport) -> None:
        regimes = self.regimes
        regimes.passes_in_epoch += self._accumulation()
        if self.wants_statistics:
            self._check(report)
            regimes.check_due = -1
            regimes.sums = {}
        regimes.sums = {**regimes.sums, **self._pending_sums}
        self.skip_step()
        if 0 < self._config.epoch_steps <= regimes.passes_in_epoch:
            self._end_epoch(report.step)

    def skip_step(self) -> None:
        self._pending_sums, self._local_norms = {}, {}

    def _check(self, report: StepReport) -> None:
        """Compares the norms of the last epoch with those of the check before."""
        regimes = self.regimes
        norms = [
            pair for names, values in report.statistics for pair in zip(names, values, strict=True)
        ]
        decayed = regimes.decayed_at >= regimes.check_due
        changes = []
        for name, norm in norms:
            if norm == 0 or not math.isfinite(norm):
                # A zero or non-finite norm carries no information about the layer.
                continue
            change = _relative_change(regimes.norms.get(name), norm)
            changes.append(change)
            critical = decayed or change >= self._config.eta
            regimes.levels[name] = "low" if critical else "high"
            regimes.norms[name] = norm
        reason = f"norms changed by up to {max(changes, default=0):.2g}, eta {self._config.eta:g}"
        self._log_decision(report.step, "the learning rate was lowered" if decayed else reason)

    def epoch_ended(self, step: int, learning_rate: float | None) -> None:
        if not self._config.epoch_steps:
            self._end_epoch(step)
        if learning_rate is not None:
            if self.regimes.learning_rate is not None:
                self.learning_rate_changed(step, self.regimes.learning_rate, learning_rate)
            self.regimes.learning_rate = learning_rate

    def _end_epoch(self, step: int) -> None:
        if self.regimes.epoch % self._config.interval == 0:
            self.regimes.check_due = step
        self.regimes.epoch += 1
        self.regimes.passes_in_epoch = 0

    def learning_rate_changed(self, step: int, before: float, after: float) -> None:
        if after < before:
            self.regimes.decayed_at = step
            self.regimes.levels = dict.fromkeys(self.regimes.levels, "low")
            self._log_decision(step, "the learning rate was lowered")
        self.regimes.learning_rate = after

    def _log_decision(self, step: int, reason: str) -> None:
        levels = list(self.regimes.levels.values())
        self.log.add(step, f"low: {levels.count('low')} of {len(levels)} layers", reason)

    def state_dict(self) -> StateDict:
        sums = {name: tensor.clone() for name, tensor in self.regimes.sums.items()}
        copies = {"levels": dict(self.regimes.levels), "norms": dict(self.regimes.norms)}
        return {**vars(self.regimes), **copies, "sums": sums}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.regimes = Regimes(**saved)
        self.regimes = replace(
            self.regimes,
            levels=dict(self.regimes.levels),
            norms=dict(self.regimes.norms),
            sums={name: tensor.clone() for name, tensor in self.regimes.sums.items()},
        )
        self.skip_step()

    def explain(self) -> dict[str, object]:
        levels = self.regimes.levels
        return {
            "setting": {level: format_spec(s.compressor) for level, s in self._settings.items()},
            "levels": dict(levels),
            "norms": dict(self.regimes.norms),
            "epoch": self.regimes.epoch,
            "accumulate": self._accumulation(),
        }

    def _accumulation(self) -> int:
        """Returns the backward passes per step that the training loop is asked to accumulate."""
        levels = self.regimes.levels
        all_high = levels and "low" not in levels.values()
        return self._config.passes()["high" if all_high else "low"]


def _relative_change(old: float | None, new: float) -> float:
    """Returns the relative change of a norm; infinity if there is none to compare with."""
    return abs(old - new) / old if old else math.inf


SHAPE = (1000, 1000)
"""Message lengths of both levels are compared for this shape."""

BATCH = "batch"
"""The setting that the training loop carries out itself."""


@dataclass(frozen=True)
class Accordion(Controller):
    """Sets `setting` to `low` in a layer's critical regimes, and to `high` elsewhere.

    `low` is little compression (a high ratio or rank), `high` is much. A layer is critical if the
    norm of its gradients' sum over an epoch differs from the norm `interval` epochs before by a
    fraction of at least `eta`. All layers are critical at the start, and after a decay of the
    learning rate until the next check. Each rank sums its own gradients, before compression and
    without residual; norms are averaged over ranks (the paper's code reads one rank). Epochs are
    counted by calls of `epoch_ended`, or are `epoch_steps` steps long if that is set.

    With setting "batch" only the batch size is controlled, for any method: `low` and `high` are
    numbers of backward passes to accumulate, `low` while any layer is critical. `accumulate_low`
    and `accumulate_high` do so in addition to another setting. The training loop reads
    `stats()["controller"]["accumulate"]` and gives the mean gradient of so many passes, which
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

    examples: ClassVar = ({"low": 0.1, "high": 0.01},)

    def __post_init__(self) -> None:
        check_number("accordion", "low", self.low)
        check_number("accordion", "high", self.high)
        check_positive_fraction("accordion", "eta", self.eta)
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
                "accordion: batch: low and high are the passes to accumulate; accumulate_low and "
                f"accumulate_high must be 1, got {got}"
            )

    def passes(self) -> dict[str, int]:
        """Returns the number of backward passes to accumulate, by level."""
        if self.setting == BATCH:
            return {"low": int(self.low), "high": int(self.high)}
        return {"low": self.accumulate_low, "high": self.accumulate_high}

    def create_state(
        self,
        compressor: Compressor,
        names: Sequence[str],
        world_size: int,
        previous: ControllerState | None = None,
    ) -> ControllerState:
        if self.setting == BATCH:
            return AccordionState(self, {"low": compressor, "high": compressor}, names, previous)
        low, high = self.settings(compressor)
        if low.nbytes(SHAPE) <= high.nbytes(SHAPE):
            got = f"{self.low!r} and {self.high!r}"
            raise ConfigError(f"accordion: low must send more than high, got {got}")
        return AccordionState(self, {"low": low, "high": high}, names, previous)

    def settings(self, compressor: Compressor) -> list[Compressor]:
        if self.setting == BATCH:
            return []
        return [at_setting(compressor, self.setting, value) for value in (self.low, self.high)]
