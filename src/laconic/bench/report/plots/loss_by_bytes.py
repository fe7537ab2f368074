"""Loss against bytes sent: what a byte buys, whatever the network."""

from collections.abc import Sequence

from laconic.bench.records.kinds import Record
from laconic.bench.report.curves import loss_curves
from laconic.bench.report.plotdata import Axis, Curves


def plot(records: Sequence[Record]) -> Curves | None:
    curves = loss_curves(records, lambda point: point.sent_bytes)
    if curves is None:
        return None
    return Curves(
        place=20,
        title="Loss against bytes sent",
        caption="Further left is better: the same loss for fewer bytes from each worker.",
        # Methods differ a hundredfold; on a linear axis all but dense would be one wall.
        x=Axis(name="bytes", label="sent by each worker", unit="B", log=True),
        y=Axis(name="loss", label="loss"),
        traces=curves.traces,
        levels=curves.levels,
    )
