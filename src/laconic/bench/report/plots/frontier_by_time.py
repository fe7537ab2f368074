"""How good a run became against how long it took: who is worth its time."""

from collections.abc import Sequence

from laconic.bench.records.kinds import Record
from laconic.bench.report.dots import frontier_plot
from laconic.bench.report.plotdata import Axis, Dots


def plot(records: Sequence[Record]) -> Dots | None:
    cost = Axis(name="time", label="time of the run", unit="s", log=True)
    return frontier_plot(records, 1, cost, lambda run: run.points[-1].time_s)
