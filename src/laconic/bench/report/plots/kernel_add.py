"""What a step with error feedback costs on a CPU, in units of adding the residual alone."""

from collections.abc import Sequence

from laconic.bench.records.kinds import KernelRecord, Record
from laconic.bench.report.plotdata import Axis, Bar, Bars, Segment
from laconic.bench.report.ruler import cut_at


def plot(records: Sequence[Record]) -> Bars | None:
    costs = {
        r.spec: r.ratio_to_add for r in records if isinstance(r, KernelRecord) and r.ratio_to_add
    }
    if not costs:
        return None
    return Bars(
        place=8,
        title="Cost of a step over that of an addition",
        caption="An addition is torch.add(g, r, out=r) of as many elements, in the same run.",
        x=Axis(name="cost", label="times the addition"),
        traces=tuple(_bar(spec, cost) for spec, cost in costs.items()),
        cut=cut_at(list(costs.values())),
    )


def _bar(spec: str, cost: float) -> Bar:
    return Bar(spec=spec, label=spec, segments=(Segment(name="step", value=cost),), total=cost)
