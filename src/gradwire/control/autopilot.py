"""Autopilot: selects the settings with the most progress per second on the current link, untuned.

A method of this library; the objective, progress times speed, comes from GraVAC (arXiv:2305.12201).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gradwire.base import Compressor
from gradwire.comm.cost_model import format_rate
from gradwire.control._autopilot.budget import OverheadBudget, RemainingSteps
from gradwire.control._autopilot.candidates import (
    GridPoint,
    check_setting_name,
    controlled_setting,
    is_uncompressed,
    setting_grid,
)
from gradwire.control._autopilot.cost_model import CostModel, LinkEstimate, Prediction
from gradwire.control._autopilot.error_model import ErrorKind
from gradwire.control.base import (
    Controller,
    ControllerState,
    DecisionLog,
    Setting,
    StateDict,
    StepReport,
)
from gradwire.control.timing import StepTiming
from gradwire.errors import ConfigError


def describe_settings(indices: Mapping[str, int], grid: Sequence[GridPoint]) -> str:
    """Returns the setting of all layers, or each setting with the number of its layers."""
    counts = sorted(Counter(indices.values()).items())
    if len(counts) == 1:
        return grid[counts[0][0]].label()
    return ", ".join(f"{grid[index].label()} ({count})" for index, count in counts) or "nothing"


def describe_changes(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """Returns how many layers send less than before, and how many more."""
    less = sum(new[name] > index for name, index in old.items())
    more = sum(new[name] < index for name, index in old.items())
    changes = [f"{n} send {what}" for n, what in ((less, "less"), (more, "more")) if n]
    return f"of {len(old)} layers {' and '.join(changes)}"


def describe_decision(old: Prediction, new: Prediction, safe: bool, link: LinkEstimate) -> str:
    """Returns the reason for a change: time and progress before and after, and the link."""
    rate_bits = round(float(f"{8 / max(link.byte_s, 1e-12):.3g}"))
    before, after = (
        f"{p.step_s * 1e3:.3g} ms per step with progress {p.progress:.2g}" for p in (old, new)
    )
    reason = f"{after} instead of {before}; the link carries {format_rate(max(rate_bits, 1))}"
    return reason if safe else f"progress is too low: {reason}"


By: TypeAlias = Literal["layer", "all"]

SWITCH_RATIO = 0.95
"""A setting replaces another if its predicted cost is at most this share of the other's. A link
whose speed is estimated wrongly by a tenth moves the times of two settings apart by half of that,
if half of a step is wire time. A new setting must exceed MIN_PROGRESS by the same margin."""
MIN_PROGRESS = 0.6
"""No setting may have less progress per step than this share of a dense one: a run falls behind by
no more than two thirds of the expected remaining steps, whatever the link. Measured with a narrow
ResNet-9 whose learning rate decays linearly, on a slow link: 75.9 % at the end, 74.3 % with 0.5,
76.5 % with 1 % of top-k."""


class AutopilotState(ControllerState):
    """Selects settings by the cost model; equal on all ranks, since all get the same statistics."""

    sample_interval: ClassVar[int] = 16
    """A sample is two norms and a sum: one in 16 was measured to add about 1 % to an exchange."""

    def __init__(
        self,
        grid: Sequence[GridPoint],
        own: Compressor,
        key: str,
        by: By,
        names: Sequence[str],
        world_size: int,
        previous: ControllerState | None,
    ) -> None:
        self.log = DecisionLog() if previous is None else previous.log
        unbiased = own.traits().unbiased
        kind: ErrorKind = "selection" if key != "bits" else "noise" if unbiased else "rounding"
        self.cost_model, self._by = CostModel(grid, kind, world_size), by
        self._initial = [point.compressor for point in grid].index(own)
        self.indices = dict.fromkeys(names, self._initial)
        self._last_indices: dict[str, int] | None = None
        """Grid indices of the last step, whose timing arrives with the next report."""
        self._decided_pace: tuple[float, float] | None = None
        """The pace at the last decision."""
        self._remaining = RemainingSteps()
        self._new_shapes: dict[str, list[int]] = {}
        self._local_errors: dict[str, Tensor] = {}
        self._sampled_indices: dict[str, int] | None = None
        """Grid indices of the step in which `_local_errors` were sampled."""
        self._on_gpu = False
        self._budget = OverheadBudget()
        self._settings = [Setting(p.compressor, is_uncompressed(i)) for i, p in enumerate(grid)]
        if isinstance(previous, AutopilotState):
            # Another method changes neither the link nor the computation.
            self.cost_model.times.recent = list(previous.cost_model.times.recent)
            self.cost_model.times.fixed_s = previous.cost_model.times.fixed_s
            self.cost_model.remaining_steps = previous.cost_model.remaining_steps
            self._remaining, self._budget = previous._remaining, previous._budget
        self._log_decision(self.log.start_step, "the method's own setting")

    @property
    def wants_statistics(self) -> bool:
        return self._budget.pause_steps == 0

    @property
    def needs_measurement(self) -> bool:
        return self.wants_statistics and bool(self._local_errors)

    def setting_for(self, name: str) -> Setting:
        layer, index = self.cost_model.layers.get(name), self.indices[name]
        # The dense message of a small layer is shorter, at a high rank for example.
        index = index if layer is None else layer.effective(index)
        return self._settings[index]

    def observe_gradient(self, name: str, grad: Tensor, scale: float) -> None:
        self._on_gpu = grad.is_cuda
        if name not in self.cost_model.layers:
            self._new_shapes[name] = list(grad.shape)

    def local_statistics(self, names: Sequence[str]) -> list[Tensor] | None:
        """Returns this rank's error and energy of each layer in the step before, if sampled."""
        if not self._local_errors:
            return []
        zeros = torch.zeros_like(next(iter(self._local_errors.values())))
        return list(torch.cat([self._local_errors.get(name, zeros) for name in names]))

    def end_step(self, report: StepReport) -> None:
        self.cost_model.add_layers(self._new_shapes)
        self.cost_model.remaining_steps = self._remaining.expected(report.step)
        self._new_shapes = {}
        if not self.wants_statistics:
            self._budget.end_paused_step()
            self._keep_for_next_step(report.local_errors or self._local_errors)
            return
        sampled = self._sampled_indices is not None and self._add_samples(
            self._sampled_indices, report
        )
        timing = report.previous_timing
        if timing is not None and all(map(math.isfinite, timing)):
            self._add_timing(timing)
        unchanged = self._last_indices == self.indices
        self._keep_for_next_step(report.local_errors)
        # The timing of the first step at a new setting arrives with the second.
        if unchanged and self.cost_model.ready and (sampled or self._pace_has_changed()):
            self._decide(report.step)

    def _add_timing(self, timing: StepTiming) -> None:
        if self._last_indices is not None:
            self.cost_model.times.add(self.cost_model.traffic(self._last_indices), timing)
        # A GPU replays steps that send statistics, so pauses would cost more than they save.
        self._budget.add(timing, may_pause=not self._on_gpu)

    def _keep_for_next_step(self, errors: Mapping[str, Tensor]) -> None:
        """Keeps the settings of the step that has ended, and its errors to be sent."""
        self._last_indices = dict(self.indices)
        if errors is not self._local_errors:
            self._local_errors = dict(errors)
            self._sampled_indices = self._last_indices if errors else None

    def _add_samples(self, indices: Mapping[str, int], report: StepReport) -> bool:
        """Adds the received errors to the model; returns whether any was usable."""
        found = False
        for names, numbers in report.statistics:
            for name, error, total in zip(names, numbers[::2], numbers[1::2], strict=False):
                # A zero or non-finite gradient carries no information about a setting.
                if math.isfinite(error) and math.isfinite(total) and total > 0:
                    layer = self.cost_model.layers[name]
                    index = layer.effective(indices[name])
                    layer.relative.add_sample(index, error, total, self.cost_model.kind)
                    found = True
        return found

    def _pace_has_changed(self) -> bool:
        """Returns whether the speed of link or computation differs from the last decision.

        If not, a decision waits for samples, so most steps cost nothing.
        """
        if self._decided_pace is None:
            return True
        pairs = zip(self._pace(), self._decided_pace, strict=True)
        return any(min(pair) < SWITCH_RATIO * max(pair) for pair in pairs)

    def _pace(self) -> tuple[float, float]:
        link = self.cost_model.times.link()
        return link.compute_s, link.byte_s

    def _decide(self, step: int) -> None:
        """Selects the settings with the least time per progress, if they are clearly better."""
        current = self.cost_model.predict(self.indices)
        probe = self.cost_model.probe(current, self._initial)
        if probe is not None:
            self._select(step, probe, "to measure how much of the time depends on bytes")
            return
        self._decided_pace = self._pace()
        per_layer = self._by == "layer"
        find = self.cost_model.best_per_layer if per_layer else self.cost_model.best_uniform
        safe = current.progress >= MIN_PROGRESS
        best = find(self.indices, MIN_PROGRESS / SWITCH_RATIO)
        if not safe or best.cost_s <= SWITCH_RATIO * current.cost_s:
            link = self.cost_model.times.link()
            self._select(step, best, describe_decision(current, best, safe, link))

    def _select(self, step: int, prediction: Prediction, reason: str) -> None:
        old, self.indices = self.indices, {**self.indices, **prediction.indices}
        if old != self.indices:
            changes = "" if self._by == "all" else f"{describe_changes(old, self.indices)}: "
            self._log_decision(step, changes + reason)

    def _log_decision(self, step: int, reason: str) -> None:
        self.log.add(step, describe_settings(self.indices, self.cost_model.grid), reason)

    def skip_step(self) -> None:
        # Errors of the step before are still to be sent; the runtime discards the timing.
        self._new_shapes = {}

    def epoch_ended(self, step: int, learning_rate: float | None) -> None:
        if learning_rate is not None:
            self._remaining.learning_rate_changed(step, learning_rate)

    def learning_rate_changed(self, step: int, before: float, after: float) -> None:
        self._remaining.learning_rate_changed(step, after, before)

    def world_size_changed(self) -> None:
        # Errors of layers stay valid; timings and the bytes sent per message byte do not.
        self.cost_model.reset_times()
        self._last_indices = self._decided_pace = None
        self._budget = OverheadBudget()

    def state_dict(self) -> StateDict:
        last, sampled, pace = self._last_indices, self._sampled_indices, self._decided_pace
        return {
            "indices": dict(self.indices),
            "last_indices": None if last is None else dict(last),
            "decided_pace": None if pace is None else list(pace),
            "remaining": vars(self._remaining).copy(),
            "local_errors": {name: tensor.clone() for name, tensor in self._local_errors.items()},
            "sampled_indices": None if sampled is None else dict(sampled),
            "budget": vars(self._budget).copy(),
            **self.cost_model.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        last, sampled = saved["last_indices"], saved["sampled_indices"]
        pace = saved["decided_pace"]
        self.indices, self._last_indices = (
            dict(saved["indices"]),
            None if last is None else dict(last),
        )
        self._decided_pace = None if pace is None else (pace[0], pace[1])
        self._remaining = RemainingSteps(**saved["remaining"])
        self._local_errors = {n: tensor.clone() for n, tensor in saved["local_errors"].items()}
        self._sampled_indices = None if sampled is None else dict(sampled)
        self._budget = OverheadBudget(**saved["budget"])
        self.cost_model.load_state_dict(saved)
        self._new_shapes = {}

    def explain(self) -> dict[str, object]:
        labels = [point.label() for point in self.cost_model.grid]
        found: dict[str, object] = {
            "setting": describe_settings(self.indices, self.cost_model.grid)
        }
        if self._by == "layer":
            found["layers"] = {name: labels[index] for name, index in self.indices.items()}
        return {**found, "overhead": self._budget.share(), **self.cost_model.explain()}


@dataclass(frozen=True)
class Autopilot(Controller):
    """Minimises the predicted step time divided by the progress of a step.

    Progress follows from the share of the norm of gradient plus residual that is sent, and from the
    expected number of remaining steps: the residual is sent eventually, so a run falls behind once
    (for unbiased rounding without a residual, the variance slows down every step). Step time
    follows from the agreed timings of past steps: computation, encoding and decoding at each
    setting, and a link model that is updated at every step. A setting with which the run would fall
    behind by most of the remaining steps is never selected, whatever it would save. Dense and 16
    bits are settings too, so nothing is compressed if that does not pay.

    By "layer", each layer has its own setting, such that the bytes sent carry most of the norm; by
    "all", all layers share one. It controls the first of ratio, rank, bits and k that the method
    has, or `setting`, and starts at the method's own value.
    """

    setting: str = "auto"
    by: By = "layer"

    def __post_init__(self) -> None:
        check_setting_name(self.setting)
        if self.by not in get_args(By):
            raise ConfigError(f"autopilot: by must be one of {[*get_args(By)]}, got {self.by!r}")

    def create_state(
        self,
        compressor: Compressor,
        names: Sequence[str],
        world_size: int,
        previous: ControllerState | None = None,
    ) -> ControllerState:
        key = controlled_setting(compressor, self.setting)
        grid = setting_grid(compressor, key)
        return AutopilotState(grid, compressor, key, self.by, names, world_size, previous)
