"""How good a run became against what it sent: who is worth its bytes."""

from collections.abc import Sequence

from laconic.bench.dots import frontier
from laconic.bench.plotdata import Axis, Dots
from laconic.bench.records import Record


def plot(records: Sequence[Record]) -> Dots | None:
    found = frontier(records, lambda run: run.points[-1].sent_bytes)
    if found is None:
        return None
    where = "left and up" if found.better == "higher" else "left and down"
    return Dots(
        place=2,
        title=f"Where runs end: {found.name} and bytes",
        caption=f"The end of each run; {where} is better. The line joins those that none beats.",
        x=Axis(name="bytes", label="sent by each worker", unit="B", log=True),
        y=Axis(name=found.name, label=f"{found.name} at the end"),
        traces=found.dots,
    )
