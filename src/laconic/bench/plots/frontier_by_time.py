"""How good a run became against how long it took: who is worth its time."""

from collections.abc import Sequence

from laconic.bench.dots import frontier
from laconic.bench.plotdata import Axis, Dots
from laconic.bench.records import Record


def plot(records: Sequence[Record]) -> Dots | None:
    found = frontier(records, lambda run: run.points[-1].time_s)
    if found is None:
        return None
    where = "left and up" if found.better == "higher" else "left and down"
    return Dots(
        place=1,
        title=f"Where runs end: {found.name} and time",
        caption=f"The end of each run; {where} is better. The line joins those that none beats.",
        x=Axis(name="time", label="time of the run", unit="s", log=True),
        y=Axis(name=found.name, label=f"{found.name} at the end"),
        traces=found.dots,
    )
