"""Where a step's time goes: encode, wire, decode and the rest, as the link's own clock saw it."""

from collections.abc import Sequence

from laconic.bench.records.kinds import KernelRecord, Record, RunRecord
from laconic.bench.records.setting import group
from laconic.bench.records.speed import middle
from laconic.bench.report.plotdata import Axis, Bar, Bars, Segment

NAMES = ("encode", "wire", "decode", "rest", "not split", "compute")
CAPTION = "Median step. The rest is {rest}; baselines of others cannot be split."
COMPUTE = " Compute is a step in which nobody talks."
OVERLAP = (
    " Communication runs beside the backward pass, so parts may add up to more than the step: "
    "the mark is the step itself."
)
CUT = " Broken bars go on: their numbers count."


def plot(records: Sequence[Record]) -> Bars | None:
    steps = [record for record in records if not isinstance(record, KernelRecord)]
    groups = group(steps, lambda record: record.spec)
    bars = [bar for spec, runs in groups.items() if (bar := _bar(spec, runs)) is not None]
    split = [bar for bar in bars if any(part.name == "wire" for part in bar.segments)]
    if not split:
        return None
    apart = any(run.compute_ms is not None for run in steps)
    caption = CAPTION.format(rest="waiting" if apart else "compute and waiting")
    overlap = any(_length(bar) > bar.total for bar in split)
    cut = _cut(max(map(_length, split)), max(map(_length, bars)))
    return Bars(
        place=30,
        title="Where a step’s time goes",  # noqa: RUF001  an apostrophe for readers
        caption="".join(
            [caption, COMPUTE if apart else "", OVERLAP if overlap else "", CUT if cut else ""]
        ),
        x=Axis(name="time", label="step time", unit="ms"),
        traces=tuple(bars),
        names=NAMES,
        cut=cut,
    )


def _length(bar: Bar) -> float:
    return sum(segment.value for segment in bar.segments)


def _cut(longest_split_ms: float, longest_ms: float) -> float | None:
    """Where to break bars off when dense is so slow that the parts of the others vanish."""
    return 1.3 * longest_split_ms if longest_ms > 2.5 * longest_split_ms else None


def _bar(spec: str, runs: Sequence[RunRecord]) -> Bar | None:
    """The medians of a method's runs; None if no step was measured."""
    step_ms = middle(run.step_ms for run in runs)
    if step_ms is None:
        return None
    parts = {
        "compute": middle(run.compute_ms for run in runs),
        "encode": middle(run.encode_ms for run in runs),
        "wire": middle(run.wire_ms for run in runs),
        "decode": middle(run.decode_ms for run in runs),
    }
    known = [Segment(name=name, value=ms) for name, ms in parts.items() if ms is not None]
    rest_ms = max(0.0, step_ms - sum(segment.value for segment in known))
    split = parts["wire"] is not None
    rest = Segment(name="rest" if split else "not split", value=rest_ms)
    return Bar(spec=spec, label=spec, segments=(*known, rest), total=step_ms)
