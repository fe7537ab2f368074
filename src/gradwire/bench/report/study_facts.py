"""Figures of a study for sentences: each is computed from the records, as text and as a number."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from gradwire.bench import human
from gradwire.bench.records.compare import Target, time_to_target
from gradwire.bench.records.schema import BASELINE, TrainRecord
from gradwire.errors import GradwireError

PERCENT = ("accuracy", "hit rate at 10", "IoU")
"""Metrics that are shares, and are written in percent."""


class MissingRunError(GradwireError):
    """A sentence needs a run that has no finished record."""


@dataclass(frozen=True)
class Facts:
    """The finished runs of a study; `rate` is the links' rate where a sentence names none."""

    records: Sequence[TrainRecord]
    rate: str

    def runs(self, spec: str, rate: str | None = None) -> list[TrainRecord]:
        """Returns the runs of a case at one rate, or raises MissingRunError."""
        wanted = rate or self.rate
        found = [r for r in self.records if (r.spec, r.rate) == (spec, wanted)]
        if not found:
            raise MissingRunError(f"no finished run of {spec} at {wanted}")
        return found

    def seeds(self, spec: str = BASELINE) -> int:
        return len(self.runs(spec))

    def metric(self, spec: str = BASELINE, rate: str | None = None) -> float:
        """Returns the metric at the end, as a mean over seeds."""
        return fmean(_known(run.metric) for run in self.runs(spec, rate))

    def end(self, spec: str = BASELINE, rate: str | None = None) -> str:
        """Returns the metric at the end as text, with its standard deviation over seeds."""
        runs = self.runs(spec, rate)
        return metric_text(runs[0].metric_name, [_known(run.metric) for run in runs])

    def ratio(self, spec: str, rate: str | None = None) -> float:
        return fmean(_known(run.ratio) for run in self.runs(spec, rate))

    def fewer(self, spec: str, rate: str | None = None) -> str:
        """Returns how many times fewer bytes than dense were sent, as text."""
        return f"{human.digits(self.ratio(spec, rate))} times"

    def step_s(self, spec: str = BASELINE, rate: str | None = None) -> float:
        """Returns the mean time of a step over the whole run."""
        return fmean(r.points[-1].time_s / r.points[-1].step for r in self.runs(spec, rate))

    def speed(self, spec: str, base: str = BASELINE, rate: str | None = None) -> float:
        """Returns the steps per time of a case over those of another."""
        return self.step_s(base, rate) / self.step_s(spec, rate)

    def faster(self, spec: str, base: str = BASELINE, rate: str | None = None) -> str:
        return f"{human.digits(self.speed(spec, base, rate))} times"

    def seconds(self, spec: str, goal: float, rate: str | None = None) -> float | None:
        """Returns the mean time to a value of the metric; None unless all runs reached it."""
        times = []
        for run in self.runs(spec, rate):
            target = Target(run.metric_name or "", goal, run.metric_better or "higher")
            times.append(time_to_target(run.points, target))
        known = [time for time in times if time is not None]
        return fmean(known) if len(known) == len(times) else None

    def time(self, spec: str, goal: float, rate: str | None = None) -> str:
        seconds = self.seconds(spec, goal, rate)
        return "never" if seconds is None else human.duration_s(seconds)

    def best(self, spec: str, rate: str | None = None) -> float:
        """Returns the best metric of any evaluation, as a mean over seeds."""
        runs = self.runs(spec, rate)
        choose = min if runs[0].metric_better == "lower" else max
        return fmean(choose(_known(point.metric) for point in run.points) for run in runs)


def metric_text(name: str | None, values: Sequence[float]) -> str:
    """Writes a mean and, of several values, the standard deviation."""
    factor, unit = (100, " %") if name in PERCENT else (1, "")
    mean = fmean(values) * factor
    text = f"{mean:.1f}" if name in PERCENT else human.digits(mean)
    if len(values) > 1:
        # With as many decimals as the mean.
        decimals = len(text.partition(".")[2])
        text += f" ± {stdev(values) * factor:.{decimals}f}"
    return text + unit


def _known(value: float | None) -> float:
    """Returns the value; a finished run has it."""
    if value is None:
        raise MissingRunError("a run ended without its metric or its bytes")
    return value
