"""What adding up eight messages costs, in units of the least that memory traffic allows."""

from collections.abc import Sequence

from laconic.bench.records.kinds import KernelRecord, Record
from laconic.bench.report.plotdata import Axis, Bar, Bars, Segment
from laconic.bench.report.ruler import cut_at


def plot(records: Sequence[Record]) -> Bars | None:
    costs = {
        r.spec: r.decode8_us / r.decode8_floor_us
        for r in records
        if isinstance(r, KernelRecord) and r.decode8_us and r.decode8_floor_us
    }
    if not costs:
        return None
    return Bars(
        place=7,
        title="Cost of adding up eight messages",
        caption="Its floor is reading all of them, and reading and writing the sum once.",
        x=Axis(name="cost", label="times the floor"),
        traces=tuple(_bar(spec, cost) for spec, cost in costs.items()),
        cut=cut_at(list(costs.values())),
    )


def _bar(spec: str, cost: float) -> Bar:
    return Bar(spec=spec, label=spec, segments=(Segment(name="decode", value=cost),), total=cost)
