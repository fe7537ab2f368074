"""Loss curves from training records: what every plot of loss against something shares."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from laconic.bench import human
from laconic.bench.plotdata import Curve, Level, thin
from laconic.bench.records import Point, Record, TrainRecord
from laconic.bench.speed import common_target


class LossCurves(NamedTuple):
    traces: tuple[Curve, ...]
    levels: tuple[Level, ...]


def loss_curves(records: Sequence[Record], x: Callable[[Point], float]) -> LossCurves | None:
    """One curve a run, without the points that are not numbers."""
    runs = [record for record in records if isinstance(record, TrainRecord) and record.points]
    if not runs:
        return None
    several = len({run.seed for run in runs}) > 1
    traces = tuple(_curve(run, x, several) for run in runs)
    target = common_target(runs)
    levels = () if target is None else (Level(label=f"target {human.goal(target)}", y=target),)
    return LossCurves(traces, levels)


def _curve(run: TrainRecord, x: Callable[[Point], float], several_seeds: bool) -> Curve:
    points = thin([p for p in run.points if math.isfinite(p.loss) and math.isfinite(x(p))])
    return Curve(
        spec=run.spec,
        label=f"{run.spec}, seed {run.seed}" if several_seeds else run.spec,
        x=tuple(x(point) for point in points),
        y=tuple(point.loss for point in points),
        step=tuple(point.step for point in points),
    )
