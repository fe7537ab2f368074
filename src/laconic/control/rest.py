"""How often a pilot may look: so that what it takes itself stays below a share of the steps."""

import math
from dataclasses import dataclass

from laconic.control.clock import Lap

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

    def hear(self, lap: Lap, *, may_rest: bool) -> None:
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
