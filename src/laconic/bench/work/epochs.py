"""When an epoch ends, and what controllers hear of the learning rate then."""

from laconic.bench.work.workload import Workload


class Epochs:
    """Follows a run of `steps` steps.

    Controllers look for decays. A rate that declines a little every step has none, so it is told
    anew only once it has halved, or has risen.
    """

    def __init__(self, workload: Workload, workers: int, steps: int) -> None:
        self._workload, self._steps = workload, steps
        self._length = max(1, workload.examples() // (workload.batch_size * workers))
        self._told = self._rate(0)

    def ended(self, step: int) -> float | None:
        """The learning rate of the next epoch, if one ends after so many steps."""
        if step % self._length:
            return None
        rate = self._rate(step)
        if rate > self._told or rate <= self._told / 2:
            self._told = rate
        return self._told

    def _rate(self, step: int) -> float:
        return self._workload.learning_rate_at(min(1.0, (step + 0.5) / self._steps))
