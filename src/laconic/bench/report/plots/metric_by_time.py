"""The metric against wall-clock time, as the run went."""

from collections.abc import Sequence

from laconic.bench.records.kinds import Record, TrainRecord
from laconic.bench.report.curves import metric_curves
from laconic.bench.report.plotdata import Axis, Curves


def plot(records: Sequence[Record]) -> Curves | None:
    curves = metric_curves(records, lambda point: point.time_s)
    if curves is None:
        return None
    runs = [r for r in records if isinstance(r, TrainRecord) and r.metric_name]
    name, better = runs[0].metric_name or "metric", runs[0].metric_better
    return Curves(
        place=25,
        title=f"{name.capitalize()} against time",
        caption="Of held-out data. Further left is better: the same, earlier.",
        x=Axis(name="time", label="time", unit="s"),
        y=Axis(name=name, label=name, rises=better != "lower"),
        traces=curves.traces,
        levels=curves.levels,
    )
