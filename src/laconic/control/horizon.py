"""How many steps are still to come: nobody tells a controller, so as many as there have been."""

from dataclasses import dataclass

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
