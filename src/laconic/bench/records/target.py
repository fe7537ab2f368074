"""What a run should reach, a loss or a metric, and when it did."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from laconic.bench import human
from laconic.bench.records.kinds import Direction, Point, TrainRecord
from laconic.errors import ConfigError

LOSS = "loss"


@dataclass(frozen=True)
class Target:
    name: str
    value: float
    better: Direction

    def words(self) -> str:
        return f"{self.name} {human.goal(self.value)}"

    def short(self, point: Point) -> float | None:
        """What a point lacks, 0 or less when it is there; None where nobody can say."""
        value = point.loss if self.name == LOSS else point.metric
        if value is None or not math.isfinite(value):
            return None
        return value - self.value if self.better == "lower" else self.value - value


def parse_target(text: str, metric: str, better: Direction) -> Target:
    """`accuracy=0.9`, `loss=2.5`, or just the number that the metric should reach."""
    name, _, number = text.rpartition("=")
    name = name.strip() or metric
    if name not in (LOSS, metric):
        raise ConfigError(f"target: expected {metric}=NUMBER or {LOSS}=NUMBER, got {text!r}")
    try:
        return Target(name, float(number), "lower" if name == LOSS else better)
    except ValueError:
        raise ConfigError(f"target: expected a number for {name}, got {number!r}") from None


def target_of(record: TrainRecord) -> Target | None:
    if record.target_loss is not None:
        return Target(LOSS, record.target_loss, "lower")
    if record.target_metric is not None:
        name = record.metric_name or "metric"
        return Target(name, record.target_metric, record.metric_better or "higher")
    return None


def common_target(records: Iterable[TrainRecord]) -> Target | None:
    """The one target of all runs that had one; None if they had none or several."""
    targets = {target_of(record) for record in records} - {None}
    return targets.pop() if len(targets) == 1 else None


def time_to_target(points: Sequence[Point], target: Target | None) -> float | None:
    """When a run first came to `target`, on a straight line between two looks."""
    if target is None:
        return None
    before: tuple[float, float] | None = None
    for point in points:
        short = target.short(point)
        if short is not None and short <= 0:
            return point.time_s if before is None else _crossing(before, point.time_s, short)
        before = None if short is None else (point.time_s, short)
    return None


def _crossing(before: tuple[float, float], time_s: float, short: float) -> float:
    before_s, before_short = before
    return before_s + before_short / (before_short - short) * (time_s - before_s)
