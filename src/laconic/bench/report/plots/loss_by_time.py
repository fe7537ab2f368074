"""Loss against wall-clock time: the race that a user of the network sees."""

from collections.abc import Sequence

from laconic.bench.records.kinds import Record
from laconic.bench.report.curves import loss_curves
from laconic.bench.report.plotdata import Axis, Curves


def plot(records: Sequence[Record]) -> Curves | None:
    curves = loss_curves(records, lambda point: point.time_s)
    if curves is None:
        return None
    return Curves(
        place=10,
        title="Loss against time",
        caption="Further left is better: the same loss, earlier.",
        x=Axis(name="time", label="time", unit="s"),
        y=Axis(name="loss", label="loss"),
        traces=curves.traces,
        levels=curves.levels,
    )
