"""Budgets of Autopilot: the expected number of remaining steps, and its own overhead limit."""

import math
from dataclasses import dataclass

from gradwire.control.timing import StepTiming

MIN_REMAINING = 300
"""At least so many steps are expected to remain: hardly any run is shorter. If a fifth of the norm
arrives, a run falls behind by 200 steps (LAG_STEPS), so no more has to arrive in the first
steps."""

DECAY_RATIO = 0.5
"""A learning rate that has fallen to this share of its peak counts as lowered, as in the usual step
schedules."""


@dataclass
class RemainingSteps:
    """Estimates the number of remaining steps from learning rates that are reported now and then.

    After a decay, as many steps are expected as the learning rate was high for. For a linear decay
    to zero this is exact: the rate has halved when half of the decay is over. For step schedules it
    is typical.
    """

    peak_rate: float | None = None
    """The highest rate since it was last lowered."""
    lowered_at: int = 0
    """The step when it was lowered."""
    peak_at: int = 0
    """The first step at the highest rate."""
    previous_steps: int = 0
    """Steps at the higher rate before."""

    def learning_rate_changed(self, step: int, rate: float, before: float | None = None) -> None:
        """Notes the learning rate from this step on, and the rate until now if it is known.

        If `before` is higher than any reported rate, it counts as if it had applied all the time.
        """
        known = [other for other in (self.peak_rate, before) if other is not None]
        highest = max(known, default=rate)
        if rate <= DECAY_RATIO * highest:
            self.previous_steps = step - self.peak_at
            self.peak_rate, self.lowered_at, self.peak_at = rate, step, step
        elif rate > highest:
            self.peak_rate, self.peak_at = rate, step
        else:
            self.peak_rate = highest

    def expected(self, step: int) -> int:
        """Returns the number of steps that are expected after this one."""
        return max(step - self.lowered_at, self.previous_steps, MIN_REMAINING)


MAX_OVERHEAD = 0.01
"""The share of the total step time that statistics and decisions may take: half of the 2 % that are
promised, since samples and longer messages are not counted."""
MAX_CREDIT_STEPS = 100
"""The unused allowance of so many steps may be kept for decisions, each of which takes as long as
several updates of statistics."""
MAX_PAUSE_STEPS = 200
"""A pause lasts at most so many steps, whatever was spent, so that a change of the link is noticed
before long."""


@dataclass
class OverheadBudget:
    """Pauses the controller when it has used its share of the time; all ranks pause together.

    It counts only seconds that all ranks have agreed on.
    """

    debt_s: float = 0.0
    pause_steps: int = 0
    """Steps that the current pause still lasts."""
    steps_since_report: int = 1
    """Steps since the last timing that was received, the coming one included."""
    overhead_s: float = 0.0
    total_s: float = 0.0

    def add(self, timing: StepTiming, *, may_pause: bool) -> None:
        """Adds a timing, with the overhead since the last one that was received."""
        allowed_s = MAX_OVERHEAD * timing.step_s
        self.overhead_s += timing.overhead_s
        self.total_s += timing.step_s * self.steps_since_report
        debt_s = self.debt_s + timing.overhead_s - allowed_s * self.steps_since_report
        self.debt_s = min(max(debt_s, -MAX_CREDIT_STEPS * allowed_s), MAX_PAUSE_STEPS * allowed_s)
        self.pause_steps = max(0, math.ceil(self.debt_s / allowed_s)) if may_pause else 0
        self.steps_since_report = 1

    def end_paused_step(self) -> None:
        self.pause_steps -= 1
        self.steps_since_report += 1

    def share(self) -> float:
        """Returns the share of the total step time that was spent so far."""
        return self.overhead_s / self.total_s if self.total_s else 0.0
