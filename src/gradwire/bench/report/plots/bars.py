"""Bar charts: step time and its breakdown, and kernel costs over the memory-traffic floor."""

from collections.abc import Sequence

from gradwire.bench import human
from gradwire.bench.records.compare import group, median_of
from gradwire.bench.records.schema import BASELINE, KernelRecord, Record, RunRecord, StepRecord
from gradwire.bench.report.plotdata import Axis, Bar, Bars, Segment, cut_at


def step_time(records: Sequence[Record]) -> Bars | None:
    bars = [bar for r in records if isinstance(r, StepRecord) and (bar := _step_bar(r)) is not None]
    if not bars:
        return None
    return Bars(
        place=5,
        title="Step time",
        caption="Median, and speed relative to dense; the whisker spans the middle 60 % of steps.",
        x=Axis(name="time", label="step time", unit="ms"),
        traces=tuple(bars),
    )


def _step_bar(record: StepRecord) -> Bar | None:
    if record.step_ms is None:
        return None
    quantiles, gain = record.step_ms_quantiles, record.ratio_to_dense
    return Bar(
        spec=record.spec,
        label=record.spec,
        segments=(Segment(name="step", value=record.step_ms),),
        total=record.step_ms,
        note=human.times(1 / gain) if gain and record.spec != BASELINE else "",
        low=quantiles[0] if quantiles else None,
        high=quantiles[2] if quantiles else None,
    )


PARTS = ("encode", "wire", "decode", "rest", "not split", "compute")
BREAKDOWN_CAPTION = "Median step. The rest is {rest}; baselines cannot be split."
COMPUTE_CAPTION = " Compute is a step without communication."
OVERLAP_CAPTION = (
    " Communication overlaps the backward pass, so parts may add up to more than the step: "
    "the mark is the step itself."
)
CUT_CAPTION = " Bars with gaps are cut off; their numbers are exact."


def step_breakdown(records: Sequence[Record]) -> Bars | None:
    steps = [record for record in records if not isinstance(record, KernelRecord)]
    groups = group(steps, lambda record: record.spec)
    bars = [bar for spec, runs in groups.items() if (bar := _breakdown_bar(spec, runs)) is not None]
    split = [bar for bar in bars if any(part.name == "wire" for part in bar.segments)]
    if not split:
        return None
    has_compute = any(run.compute_ms is not None for run in steps)
    caption = BREAKDOWN_CAPTION.format(rest="waiting" if has_compute else "compute and waiting")
    overlap = any(_bar_length(bar) > bar.total for bar in split)
    cut = _breakdown_cut(max(map(_bar_length, split)), max(map(_bar_length, bars)))
    return Bars(
        place=30,
        title="Where a step’s time goes",  # noqa: RUF001  an apostrophe for readers
        caption="".join(
            [
                caption,
                COMPUTE_CAPTION if has_compute else "",
                OVERLAP_CAPTION if overlap else "",
                CUT_CAPTION if cut else "",
            ]
        ),
        x=Axis(name="time", label="step time", unit="ms"),
        traces=tuple(bars),
        names=PARTS,
        cut=cut,
    )


def _bar_length(bar: Bar) -> float:
    return sum(segment.value for segment in bar.segments)


def _breakdown_cut(longest_split_ms: float, longest_ms: float) -> float | None:
    """Returns where to cut bars off if dense is so slow that parts of the others are invisible."""
    return 1.3 * longest_split_ms if longest_ms > 2.5 * longest_split_ms else None


def _breakdown_bar(spec: str, runs: Sequence[RunRecord]) -> Bar | None:
    """Makes a bar of the medians of a method's runs; None if no step was measured."""
    step_ms = median_of(run.step_ms for run in runs)
    if step_ms is None:
        return None
    parts = {
        "compute": median_of(run.compute_ms for run in runs),
        "encode": median_of(run.encode_ms for run in runs),
        "wire": median_of(run.wire_ms for run in runs),
        "decode": median_of(run.decode_ms for run in runs),
    }
    known = [Segment(name=name, value=ms) for name, ms in parts.items() if ms is not None]
    rest_ms = max(0.0, step_ms - sum(segment.value for segment in known))
    split = parts["wire"] is not None
    rest = Segment(name="rest" if split else "not split", value=rest_ms)
    return Bar(spec=spec, label=spec, segments=(*known, rest), total=step_ms)


KERNEL_CAPTION = "From gradient and residual to message and new residual; 1 is the speed of a copy."
BY_CALLS_CAPTION = " As CUDA graphs, and by single calls."


def kernel_cost(records: Sequence[Record]) -> Bars | None:
    measured = [r for r in records if isinstance(r, KernelRecord) and r.status == "done"]
    if not measured:
        return None
    some_graphs = any(record.ef_step_by == "graph" for record in measured)
    return Bars(
        place=6,
        title="Cost of a step over its floor",
        caption=KERNEL_CAPTION + (BY_CALLS_CAPTION if some_graphs else ""),
        x=Axis(name="cost", label="times the floor"),
        traces=tuple(_kernel_bar(record, some_graphs) for record in measured),
        cut=cut_at([record.ratio_to_floor for record in measured]),
    )


def _kernel_bar(record: KernelRecord, some_graphs: bool) -> Bar:
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


def kernel_decode(records: Sequence[Record]) -> Bars | None:
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
        caption="The floor is to read all of them, and to read and write the sum once.",
        x=Axis(name="cost", label="times the floor"),
        traces=tuple(_decode_bar(spec, cost) for spec, cost in costs.items()),
        cut=cut_at(list(costs.values())),
    )


def _decode_bar(spec: str, cost: float) -> Bar:
    return Bar(spec=spec, label=spec, segments=(Segment(name="decode", value=cost),), total=cost)


def kernel_add(records: Sequence[Record]) -> Bars | None:
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
        traces=tuple(_add_bar(spec, cost) for spec, cost in costs.items()),
        cut=cut_at(list(costs.values())),
    )


def _add_bar(spec: str, cost: float) -> Bar:
    return Bar(spec=spec, label=spec, segments=(Segment(name="step", value=cost),), total=cost)
