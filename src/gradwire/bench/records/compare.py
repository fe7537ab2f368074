"""Comparisons between runs: their settings, the time to a target, and speed-ups."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar

from gradwire.bench import human
from gradwire.bench.records.schema import (
    BASELINE,
    Direction,
    KernelRecord,
    Point,
    StepRecord,
    TrainRecord,
)
from gradwire.errors import ConfigError

R = TypeVar("R")
K = TypeVar("K")


class Links(NamedTuple):
    """The links between workers; the rate is valid only if the links were shaped to it."""

    workers: int
    rate: str | None
    shaped: bool

    def words(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers != 1 else ''}"
        return f"{workers}, {links_words(self)}"


def links_words(links: Links) -> str:
    """Describes the rate of the links, without the number of workers."""
    if not links.shaped:
        return "links not shaped"
    return f"links shaped to {human.rate(links.rate or 'an unnamed rate')}"


class TrainSetting(NamedTuple):
    workload: str
    links: Links
    steps: int | None
    device: str

    def words(self) -> str:
        steps = "" if self.steps is None else f", {self.steps:,} steps"
        return f"{self.workload}{steps}, {_on(self.device)}{self.links.words()}"


class StepSetting(NamedTuple):
    parameters: int
    batch: int
    links: Links
    workload: str | None
    device: str

    def words(self) -> str:
        name = "" if self.workload is None else f"{self.workload}, "
        millions = human.digits(self.parameters / 1e6)
        size = f"{millions} M parameters, batch {self.batch}"
        return f"{name}{size}, {_on(self.device)}{self.links.words()}"


class KernelSetting(NamedTuple):
    device: str
    backend: str
    numel: int
    threads: int

    def words(self) -> str:
        threads = f" in {self.threads} threads" if self.device == "cpu" and self.threads > 1 else ""
        return f"{self.numel:,} elements on {self.device}, {self.backend} kernels{threads}"


def kernel_setting(record: KernelRecord) -> KernelSetting:
    return KernelSetting(record.device, record.backend, record.numel, record.threads)


def train_setting(record: TrainRecord) -> TrainSetting:
    return TrainSetting(record.workload, _links(record), record.steps, record.device)


def step_setting(record: StepRecord) -> StepSetting:
    links = _links(record)
    return StepSetting(record.parameters, record.batch, links, record.workload, record.device)


def _on(device: str) -> str:
    return "" if device == "cpu" else f"{device}, "


def group(records: Iterable[R], key: Callable[[R], K]) -> dict[K, list[R]]:
    """Groups records by `key`, both in order of first appearance."""
    groups: dict[K, list[R]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _links(record: TrainRecord | StepRecord) -> Links:
    return Links(record.workers, record.rate if record.shaped else None, record.shaped)


LOSS = "loss"


@dataclass(frozen=True)
class Target:
    name: str
    value: float
    better: Direction

    def words(self) -> str:
        return f"{self.name} {human.goal(self.value)}"

    def gap(self, point: Point) -> float | None:
        """Returns the distance to the target, at most 0 once reached; None if unknown."""
        value = point.loss if self.name == LOSS else point.metric
        if value is None or not math.isfinite(value):
            return None
        return value - self.value if self.better == "lower" else self.value - value


def parse_target(text: str, metric: str, better: Direction) -> Target:
    """Parses `accuracy=0.9`, `loss=2.5`, or just the number that the metric should reach."""
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
    """Returns the target of all runs that have one; None if they have none or several."""
    targets = {target_of(record) for record in records} - {None}
    return targets.pop() if len(targets) == 1 else None


def time_to_target(points: Sequence[Point], target: Target | None) -> float | None:
    """Returns the time at which `target` was first reached, interpolated between evaluations."""
    if target is None:
        return None
    before: tuple[float, float] | None = None
    for point in points:
        gap = target.gap(point)
        if gap is not None and gap <= 0:
            return point.time_s if before is None else _crossing(before, point.time_s, gap)
        before = None if gap is None else (point.time_s, gap)
    return None


def _crossing(before: tuple[float, float], time_s: float, gap: float) -> float:
    before_s, before_gap = before
    return before_s + before_gap / (before_gap - gap) * (time_s - before_s)


class TargetTime(NamedTuple):
    """The median time of a method that reached the target in every one of its runs."""

    spec: str
    time_s: float


def median_of(values: Iterable[float | None]) -> float | None:
    """Returns the median of the known values, or None if all are None."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def target_times(records: Sequence[TrainRecord]) -> list[TargetTime]:
    """Returns the methods that reached the common target, fastest first.

    A method that missed it with one seed did not reach it: its median would look too good.
    Interrupted runs are ignored.
    """
    if common_target(records) is None:
        return []
    reached = []
    finished = [record for record in records if record.status != "interrupted"]
    for spec, runs in group(finished, lambda record: record.spec).items():
        times = [run.time_to_target_s for run in runs if run.time_to_target_s is not None]
        if len(times) == len(runs):
            reached.append(TargetTime(spec, median(times)))
    return sorted(reached, key=lambda entry: entry.time_s)


def speed_up(record: TrainRecord, records: Sequence[TrainRecord]) -> float | None:
    """Returns dense time over that of `record`: to the target if there is one, else per step."""
    dense = [other for other in records if other.spec == BASELINE]
    if common_target(records) is None:
        return _over(median_of(run.step_ms for run in dense), record.step_ms)
    return _over(median_of(run.time_to_target_s for run in dense), record.time_to_target_s)


def efficiency(compute_ms: float | None, step_ms: float | None) -> float | None:
    """Returns the work of N workers over N times that of one worker without communication."""
    return compute_ms / step_ms if compute_ms is not None and step_ms else None


def _over(dense: float | None, own: float | None) -> float | None:
    return dense / own if dense is not None and own else None
