"""Times to a target at the best length of run: a view that a schedule's length does not decide.

A schedule that anneals to its last step reaches a target near its end, so the time to the target is
mostly the length of the run. Each method is therefore trained at several lengths, and counts with
the one that reaches the target first.
"""

from collections.abc import Sequence
from statistics import fmean

from gradwire.bench import human
from gradwire.bench.records.compare import common_target, group
from gradwire.bench.records.schema import BASELINE, TrainRecord
from gradwire.bench.report.grid import Cell, Grid, Row
from gradwire.bench.report.study_grids import half_baseline


def longest(records: Sequence[TrainRecord]) -> list[TrainRecord]:
    """Returns the runs of the longest schedule of each workload, number of workers and device."""
    kept = []
    for runs in group(records, lambda r: (r.workload_spec, r.workers, r.device)).values():
        steps = max(run.steps or 0 for run in runs)
        kept += [run for run in runs if (run.steps or 0) == steps]
    return kept


def best_length_grid(records: Sequence[TrainRecord]) -> Grid | None:
    """Returns each method's shortest time to the target over its lengths of run, at one rate.

    A length counts if all of its seeds are done and have reached the target. None if there is no
    common target, or one length only.
    """
    done = [run for run in records if run.status == "done"]
    target = common_target(done)
    by_length = group(done, lambda run: run.steps)
    if target is None or len(by_length) < 2:
        return None
    dense = _best(
        [_seconds([r for r in runs if r.spec == BASELINE]) for runs in by_length.values()]
    )
    halves = [half_baseline(group(runs, _row)) for runs in by_length.values()]
    half = _best([one.target_s for one in halves])
    mark = ", computed" if any(one.computed for one in halves) else ""
    columns = ("method", "lengths", "best length", "seeds", f"time to {target.words()}")
    speeds = ("speed-up on fp32", f"on 16 bits{mark}")
    rows = [_method(spec, runs, dense, half) for spec, runs in group(done, _spec).items()]
    return Grid((*columns, *speeds), tuple(rows))


def _method(spec: str, runs: Sequence[TrainRecord], dense: float | None, half: float | None) -> Row:
    lengths = group(runs, lambda run: run.steps)
    times = {steps: _seconds(own) for steps, own in lengths.items()}
    reached = {steps: seconds for steps, seconds in times.items() if seconds is not None}
    count = Cell(f"{len(reached)} of {len(times)} reach it", len(reached))
    if not reached:
        none = Cell(human.NO_VALUE, None)
        return Row(spec, "done", (Cell(spec, spec), count, none, none, none, none, none))
    best = min(reached, key=lambda steps: reached[steps])
    seconds, seeds = reached[best], len({run.seed for run in lengths[best]})
    cells = (
        Cell(spec, spec),
        count,
        Cell(f"{best:,} steps", best),
        Cell(str(seeds), seeds),
        Cell(human.duration_s(seconds), seconds),
        _speed(dense, seconds),
        _speed(half, seconds),
    )
    return Row(spec, "done", cells)


def _spec(run: TrainRecord) -> str:
    return run.spec


def _row(run: TrainRecord) -> tuple[str, str]:
    return run.spec, run.status


def _seconds(runs: Sequence[TrainRecord]) -> float | None:
    """Returns the mean time to the target; None unless every run has reached it."""
    times = [run.time_to_target_s for run in runs if run.time_to_target_s is not None]
    return fmean(times) if times and len(times) == len(runs) else None


def _best(times: Sequence[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _speed(base: float | None, own: float) -> Cell:
    factor = base / own if base is not None else None
    return Cell(human.times(factor), factor)
