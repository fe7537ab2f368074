"""Curves of training runs: loss by time, loss by bytes sent, and metric by time."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradwire.bench.records.compare import LOSS, common_target
from gradwire.bench.records.schema import Point, Record, TrainRecord
from gradwire.bench.report.plotdata import Axis, Curve, Curves, Level, subsample

Read = Callable[[Point], float]


class RunCurves(NamedTuple):
    traces: tuple[Curve, ...]
    levels: tuple[Level, ...]


def loss_curves(records: Sequence[Record], x: Read) -> RunCurves | None:
    """Makes one loss curve per run, without non-finite points; None without runs."""
    runs = [record for record in records if isinstance(record, TrainRecord) and record.points]
    return _curves(runs, x, lambda point: point.loss, LOSS) if runs else None


def metric_curves(records: Sequence[Record], x: Read) -> RunCurves | None:
    """Makes one metric curve per run; None unless all runs have the same metric."""
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
    points = subsample([p for p in run.points if math.isfinite(y(p)) and math.isfinite(x(p))])
    return Curve(
        spec=run.spec,
        label=f"{run.spec}, seed {run.seed}" if several_seeds else run.spec,
        x=tuple(x(point) for point in points),
        y=tuple(y(point) for point in points),
        step=tuple(point.step for point in points),
    )


def loss_by_time(records: Sequence[Record]) -> Curves | None:
    curves = loss_curves(records, lambda point: point.time_s)
    if curves is None:
        return None
    return Curves(
        place=10,
        title="Loss against time",
        caption="Further left is better: the same loss, earlier.",
        x=Axis(name="time", label="time", unit="s"),
        y=Axis(name="loss", label="loss"),
        traces=curves.traces,
        levels=curves.levels,
    )


def loss_by_bytes(records: Sequence[Record]) -> Curves | None:
    curves = loss_curves(records, lambda point: point.sent_bytes)
    if curves is None:
        return None
    return Curves(
        place=20,
        title="Loss against bytes sent",
        caption="Further left is better: the same loss for fewer bytes from each worker.",
        # Methods differ a hundredfold; on a linear axis all but dense would coincide.
        x=Axis(name="bytes", label="sent by each worker", unit="B", log=True),
        y=Axis(name="loss", label="loss"),
        traces=curves.traces,
        levels=curves.levels,
    )


def metric_by_time(records: Sequence[Record]) -> Curves | None:
    curves = metric_curves(records, lambda point: point.time_s)
    if curves is None:
        return None
    runs = [r for r in records if isinstance(r, TrainRecord) and r.metric_name]
    name, better = runs[0].metric_name or "metric", runs[0].metric_better
    return Curves(
        place=25,
        title=f"{name.capitalize()} against time",
        caption="Of held-out data. Further left is better: the same value, earlier.",
        x=Axis(name="time", label="time", unit="s"),
        y=Axis(name=name, label=name, rises=better != "lower"),
        traces=curves.traces,
        levels=curves.levels,
    )
