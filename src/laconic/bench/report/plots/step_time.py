"""Step time by method, with its spread, from the step benchmark."""

from collections.abc import Sequence

from laconic.bench import human
from laconic.bench.records.kinds import BASELINE, Record, StepRecord
from laconic.bench.report.plotdata import Axis, Bar, Bars, Segment


def plot(records: Sequence[Record]) -> Bars | None:
    bars = [bar for r in records if isinstance(r, StepRecord) and (bar := _bar(r)) is not None]
    if not bars:
        return None
    return Bars(
        place=5,
        title="Step time",
        caption="Median, and speed against dense; the whisker spans the middle 60 % of steps.",
        x=Axis(name="time", label="step time", unit="ms"),
        traces=tuple(bars),
    )


def _bar(record: StepRecord) -> Bar | None:
    if record.step_ms is None:
        return None
    quantiles, gain = record.step_ms_quantiles, record.ratio_to_dense
    return Bar(
        spec=record.spec,
        label=record.spec,
        segments=(Segment(name="step", value=record.step_ms),),
        total=record.step_ms,
        note=human.times(1 / gain) if gain and record.spec != BASELINE else "",
        low=quantiles[0] if quantiles else None,
        high=quantiles[2] if quantiles else None,
    )
