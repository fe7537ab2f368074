"""What a step with error feedback costs, in units of the least that memory traffic allows."""

from collections.abc import Sequence

from laconic.bench.records.kinds import KernelRecord, Record
from laconic.bench.report.plotdata import Axis, Bar, Bars, Segment
from laconic.bench.report.ruler import cut_at

CAPTION = "Gradient and residual in, message and new residual out; a copy's speed is 1."
BY_CALLS = " As CUDA graphs, and by calls."


def plot(records: Sequence[Record]) -> Bars | None:
    measured = [r for r in records if isinstance(r, KernelRecord) and r.status == "done"]
    if not measured:
        return None
    some_graphs = any(record.ef_step_by == "graph" for record in measured)
    return Bars(
        place=6,
        title="Cost of a step over its floor",
        caption=CAPTION + (BY_CALLS if some_graphs else ""),
        x=Axis(name="cost", label="times the floor"),
        traces=tuple(_bar(record, some_graphs) for record in measured),
        cut=cut_at([record.ratio_to_floor for record in measured]),
    )


def _bar(record: KernelRecord, some_graphs: bool) -> Bar:
    cost = record.ratio_to_floor
    calls = (record.ef_step_eager_us or record.ef_step_us) / record.floor_us
    graph = record.ef_step_by == "graph"
    return Bar(
        spec=record.spec,
        label=record.spec,
        segments=(Segment(name="step", value=cost),),
        total=cost,
        note=f"by calls {calls:.1f}" if graph else "by calls" if some_graphs else "",
    )
