"""Budgets of Autopilot: the expected number of remaining steps, and its own overhead limit."""

import math
from dataclasses import dataclass

from gradwire.control.timing import StepTiming

FEW = 300
"""Steps that are taken to follow at least: hardly anybody trains for less. If a fifth of the norm
arrives, a run falls behind by 200 steps (LAG), so no more has to arrive in the first steps."""

LOWERED = 0.5
"""A learning rate that has fallen by so much is another one; the usual schedules' stairs do."""


@dataclass
class Horizon:
    """Plain numbers, from learning rates that are told now and then.

    A learning rate that has fallen is followed by as many steps as it was high for. Of one that
    falls evenly to zero that is all there are: it has halved when half of its fall is over. Of
    stairs it is what the usual ones have.
    """

    rate: float | None = None
    """The highest since it was last lowered."""
    since: int = 0
    """The step when it was lowered."""
    risen: int = 0
    """The first step at the highest."""
    before: int = 0
    """Steps at the higher rate before."""

    def hear(self, step: int, rate: float, before: float | None = None) -> None:
        """The learning rate from this step on; `before`, what it was until now, where that is said.

        That one may have risen unheard: it is then taken to have been so all the time.
        """
        known = [other for other in (self.rate, before) if other is not None]
        highest = max(known, default=rate)
        if rate <= LOWERED * highest:
            self.before = step - self.risen
            self.rate, self.since, self.risen = rate, step, step
        elif rate > highest:
            self.rate, self.risen = rate, step
        else:
            self.rate = highest

    def ahead(self, step: int) -> int:
        """How many steps are taken to follow this one."""
        return max(step - self.since, self.before, FEW)


LIMIT = 0.01
"""Of the time of all steps, what hearing, telling and deciding may take: half of the 2 % that are
promised, since samples and longer messages are not counted."""
SAVED = 100
"""What so many steps allow may be kept for decisions, each of which takes as long as several
looks."""
LONGEST = 200
"""Steps that a rest lasts at most, whatever was spent: a link must not change unseen for long."""


@dataclass
class Rest:
    """Seconds that all ranks know of, so that all of them rest at the same steps."""

    debt_s: float = 0.0
    left: int = 0
    """Steps to rest from now on."""
    unheard: int = 1
    """Steps since the last lap that was heard, the coming one included."""
    own_s: float = 0.0
    steps_s: float = 0.0

    def hear(self, lap: StepTiming, *, may_rest: bool) -> None:
        """A lap, with what was spent since the one before that was heard."""
        allowed_s = LIMIT * lap.step_s
        self.own_s += lap.own_s
        self.steps_s += lap.step_s * self.unheard
        debt_s = self.debt_s + lap.own_s - allowed_s * self.unheard
        self.debt_s = min(max(debt_s, -SAVED * allowed_s), LONGEST * allowed_s)
        self.left = max(0, math.ceil(self.debt_s / allowed_s)) if may_rest else 0
        self.unheard = 1

    def go_on(self) -> None:
        """A step has passed at rest."""
        self.left, self.unheard = self.left - 1, self.unheard + 1

    def share(self) -> float:
        """Of the time of all steps so far, what was spent."""
        return self.own_s / self.steps_s if self.steps_s else 0.0
