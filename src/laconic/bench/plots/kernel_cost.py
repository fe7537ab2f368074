"""What a step with error feedback costs, in units of the least that memory traffic allows."""

from collections.abc import Sequence

from laconic.bench.plotdata import Axis, Bar, Bars, Segment
from laconic.bench.records import KernelRecord, Record


def plot(records: Sequence[Record]) -> Bars | None:
    bars = [_bar(r) for r in records if isinstance(r, KernelRecord)]
    if not bars:
        return None
    return Bars(
        place=6,
        title="Cost of a step over its floor",
        caption="Gradient and residual in, message and new residual out; a copy's speed is 1.",
        x=Axis(name="cost", label="times the floor"),
        traces=tuple(bars),
    )


def _bar(record: KernelRecord) -> Bar:
    cost = record.ratio_to_floor
    return Bar(
        spec=record.spec,
        label=record.spec,
        segments=(Segment(name="step", value=cost),),
        total=cost,
    )
