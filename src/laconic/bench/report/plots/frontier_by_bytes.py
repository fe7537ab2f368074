"""How good a run became against what it sent: who is worth its bytes."""

from collections.abc import Sequence

from laconic.bench.records.kinds import Record
from laconic.bench.report.dots import frontier_plot
from laconic.bench.report.plotdata import Axis, Dots


def plot(records: Sequence[Record]) -> Dots | None:
    cost = Axis(name="bytes", label="sent by each worker", unit="B", log=True)
    return frontier_plot(records, 2, cost, lambda run: run.points[-1].sent_bytes)
