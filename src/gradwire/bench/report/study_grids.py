"""Grids of a study over all seeds: quality at the end of one schedule, and times.

Every number is a mean, with the standard deviation where there are several seeds. Runs that were
interrupted have rows of their own, so that they are in no mean of finished runs.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from gradwire.bench import human
from gradwire.bench.records.compare import Target, common_target, group
from gradwire.bench.records.schema import BASELINE, TrainRecord
from gradwire.bench.report.grid import Cell, Grid, Row

HALF_BASELINES = ("torch-bf16", "torch-fp16")
"""Dense means in 16 bits; the first that was run stands beside fp32."""
COMPUTED = "16 bits (computed)"
"""The row of a 16-bit mean that was not run: that of fp32 with half of its time on the wire."""


class HalfBaseline(NamedTuple):
    """The times of a dense mean in 16 bits, and whether they are computed from those of fp32."""

    step_ms: float | None
    target_s: float | None
    computed: bool


def quality_grid(records: Sequence[TrainRecord]) -> Grid:
    """Returns loss and metric at the end of the runs; a controller has a row per rate."""
    rows = []
    for (label, status), runs in _by_row(records, _label).items():
        once = [*{run.seed: run for run in runs}.values()]
        cells = (
            Cell(label, label),
            _seeds(once),
            _steps(once),
            _mean((run.final_loss for run in once), human.digits),
            _mean((run.metric for run in once), human.digits),
            _mean((run.ratio for run in once), human.times),
            Cell(status, status),
        )
        rows.append(Row(once[0].spec, status, cells))
    metric = next((r.metric_name for r in records if r.metric_name), "metric")
    columns = ("method", "seeds", "steps", "loss", metric, "fewer bytes", "status")
    return Grid(columns, tuple(rows))


def time_grid(records: Sequence[TrainRecord]) -> Grid:
    """Returns times at one rate, and speed-ups against dense means in 32 and in 16 bits.

    Speed-ups are those of the time to the common target, or of a step if there is no target.
    """
    target = common_target(records)
    rows = _by_row(records, lambda record: record.spec)
    dense = rows.get((BASELINE, "done"), [])
    dense_ms, dense_s = _step_ms(dense), _target_s(dense)
    half = half_baseline(rows)
    columns = ["method", "seeds", "steps", "step"]
    if target is not None:
        columns.append(f"time to {target.words()}")
    mark = ", computed" if half.computed else ""
    columns += ["speed-up on fp32", f"on 16 bits{mark}", "status"]

    def cells(start: Sequence[Cell], time: Cell, own: float | None, status: str) -> Row:
        bases = (dense_ms, half.step_ms) if target is None else (dense_s, half.target_s)
        speeds = (_speed(base, own) for base in bases)
        middle = [] if target is None else [time]
        return Row(start[0].text, status, (*start, *middle, *speeds, Cell(status, status)))

    found = []
    for (spec, status), runs in rows.items():
        start = Cell(spec, spec), _seeds(runs), _steps(runs), _mean(_steps_ms(runs), _ms)
        own = _step_ms(runs) if target is None else _target_s(runs)
        found.append(cells(start, _target_cell(runs, target), own, status))
    if half.computed and half.step_ms is not None:
        none = Cell(human.NO_VALUE, None)
        start = Cell(COMPUTED, COMPUTED), none, none, Cell(_ms(half.step_ms), half.step_ms)
        time = Cell(human.duration_s(half.target_s), half.target_s)
        own = half.step_ms if target is None else half.target_s
        found.append(cells(start, time, own, "done"))
    return Grid(tuple(columns), tuple(found))


def study_grid(records: Sequence[TrainRecord]) -> Grid:
    """Returns the times at one rate, with the metric and the bytes of the same runs."""
    times, quality = time_grid(records), quality_grid(records)
    found = {(row.cells[0].text, row.status): row.cells for row in quality.rows}
    labels: dict[tuple[str, str], str] = {(r.spec, r.status): _label(r) for r in records}
    none = Cell(human.NO_VALUE, None)
    rows = []
    for row in times.rows:
        own = found.get((labels.get((row.spec, row.status), row.spec), row.status))
        middle = (own[4], own[5]) if own else (none, none)
        rows.append(Row(row.spec, row.status, (*row.cells[:3], *middle, *row.cells[3:])))
    columns = (*times.columns[:3], *quality.columns[4:6], *times.columns[3:])
    return Grid(columns, tuple(rows))


def half_baseline(rows: dict[tuple[str, str], list[TrainRecord]]) -> HalfBaseline:
    """Returns the first 16-bit run, or fp32 with half of the time on the wire.

    The part of the exchange that overlaps with computation stays the same, but is at most all of
    it; the steps to a target are those of fp32.
    """
    for spec in HALF_BASELINES:
        if (spec, "done") in rows:
            runs = rows[spec, "done"]
            return HalfBaseline(_step_ms(runs), _target_s(runs), computed=False)
    dense = rows.get((BASELINE, "done"), [])
    steps_ms = [step_ms for run in dense if (step_ms := _half_step_ms(run)) is not None]
    dense_ms, dense_s = _step_ms(dense), _target_s(dense)
    if not steps_ms or dense_ms is None:
        return HalfBaseline(None, None, computed=True)
    step_ms = fmean(steps_ms)
    target_s = None if dense_s is None else dense_s * step_ms / dense_ms
    return HalfBaseline(step_ms, target_s, computed=True)


def _half_step_ms(run: TrainRecord) -> float | None:
    if run.wire_ms is None or run.compute_ms is None or run.step_ms is None:
        return None
    codec_ms = (run.encode_ms or 0.0) + (run.decode_ms or 0.0)
    overlapped_ms = max(0.0, run.compute_ms + codec_ms + run.wire_ms - run.step_ms)
    exchange_ms = codec_ms + run.wire_ms / 2
    return run.compute_ms + max(0.0, exchange_ms - overlapped_ms)


def _by_row(
    records: Sequence[TrainRecord], name: Callable[[TrainRecord], str]
) -> dict[tuple[str, str], list[TrainRecord]]:
    return group(records, lambda record: (name(record), record.status))


def _label(record: TrainRecord) -> str:
    rate = human.rate(record.rate or "an unnamed rate")
    return f"{record.spec}, {rate}" if "controller=" in record.spec else record.spec


def _seeds(runs: Sequence[TrainRecord]) -> Cell:
    count = len({run.seed for run in runs})
    return Cell(str(count), count)


def _steps(runs: Sequence[TrainRecord]) -> Cell:
    """Shows the steps that the shortest run took, and how many were asked if these are more."""
    done = min((run.points[-1].step if run.points else 0) for run in runs)
    asked = runs[0].steps
    text = f"{done:,}" if asked is None or done >= asked else f"{done:,} of {asked:,}"
    return Cell(text, done)


def _mean(values: Iterable[float | None], form: Callable[[float | None], str]) -> Cell:
    known = [value for value in values if value is not None]
    if not known:
        return Cell(human.NO_VALUE, None)
    mean = fmean(known)
    text = human.spread(mean, stdev(known), form) if len(known) > 1 else form(mean)
    return Cell(text, mean)


def _ms(value: float | None) -> str:
    return human.duration_ms(value)


def _steps_ms(runs: Sequence[TrainRecord]) -> list[float]:
    """Returns the mean step of each run, which differs from the last one under a controller."""
    return [run.points[-1].time_s / run.points[-1].step * 1e3 for run in runs if _timed(run)]


def _timed(run: TrainRecord) -> bool:
    return bool(run.points) and run.points[-1].step > 0


def _step_ms(runs: Sequence[TrainRecord]) -> float | None:
    steps_ms = _steps_ms(runs)
    return fmean(steps_ms) if steps_ms else None


def _target_s(runs: Sequence[TrainRecord]) -> float | None:
    """Returns the mean time to the target; None unless every run has reached it."""
    times = [run.time_to_target_s for run in runs if run.time_to_target_s is not None]
    return fmean(times) if times and len(times) == len(runs) else None


def _target_cell(runs: Sequence[TrainRecord], target: Target | None) -> Cell:
    reached = [run for run in runs if run.time_to_target_s is not None]
    if target is None or len(reached) < len(runs):
        return Cell(f"reached by {len(reached)} of {len(runs)}", None)
    return _mean((run.time_to_target_s for run in runs), human.duration_s)


def _speed(base: float | None, own: float | None) -> Cell:
    factor = base / own if base is not None and own else None
    return Cell(human.times(factor), factor)
