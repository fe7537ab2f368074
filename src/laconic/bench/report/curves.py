"""Curves from training records: what every plot of loss or metric against something shares."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from laconic.bench.records.kinds import Point, Record, TrainRecord
from laconic.bench.records.target import LOSS, common_target
from laconic.bench.report.plotdata import Curve, Level, thin

Read = Callable[[Point], float]


class RunCurves(NamedTuple):
    traces: tuple[Curve, ...]
    levels: tuple[Level, ...]


def loss_curves(records: Sequence[Record], x: Read) -> RunCurves | None:
    """One curve a run, without the points that are not numbers."""
    runs = [record for record in records if isinstance(record, TrainRecord) and record.points]
    return _curves(runs, x, lambda point: point.loss, LOSS) if runs else None


def metric_curves(records: Sequence[Record], x: Read) -> RunCurves | None:
    """The same of the metric, where all runs have one and the same."""
    runs = [record for record in records if isinstance(record, TrainRecord) and record.points]
    names = {run.metric_name for run in runs}
    if len(names) != 1 or any(point.metric is None for run in runs for point in run.points):
        return None
    return _curves(runs, x, _metric, str(names.pop()))


def _curves(runs: Sequence[TrainRecord], x: Read, y: Read, name: str) -> RunCurves:
    several = len({run.seed for run in runs}) > 1
    traces = tuple(_curve(run, x, y, several) for run in runs)
    target = common_target(runs)
    known = target is not None and target.name == name
    levels = (Level(label=f"target {target.words()}", y=target.value),) if target and known else ()
    return RunCurves(traces, levels)


def _metric(point: Point) -> float:
    return math.nan if point.metric is None else point.metric


def _curve(run: TrainRecord, x: Read, y: Read, several_seeds: bool) -> Curve:
    points = thin([p for p in run.points if math.isfinite(y(p)) and math.isfinite(x(p))])
    return Curve(
        spec=run.spec,
        label=f"{run.spec}, seed {run.seed}" if several_seeds else run.spec,
        x=tuple(x(point) for point in points),
        y=tuple(y(point) for point in points),
        step=tuple(point.step for point in points),
    )
