"""Who was first, and how much faster than dense, among the records of one setting."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from laconic.bench.records.kinds import BASELINE, TrainRecord
from laconic.bench.records.setting import group
from laconic.bench.records.target import common_target


class Standing(NamedTuple):
    """A method that reached the target in every one of its runs, and its median time."""

    spec: str
    time_s: float


def middle(values: Iterable[float | None]) -> float | None:
    """The median of what was measured."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def standings(records: Sequence[TrainRecord]) -> list[Standing]:
    """Methods that reached the common target, fastest first.

    A method that missed it with one seed did not reach it: its median would flatter it. Runs
    that somebody interrupted say nothing either way.
    """
    if common_target(records) is None:
        return []
    reached = []
    finished = [record for record in records if record.status != "interrupted"]
    for spec, runs in group(finished, lambda record: record.spec).items():
        times = [run.time_to_target_s for run in runs if run.time_to_target_s is not None]
        if len(times) == len(runs):
            reached.append(Standing(spec, median(times)))
    return sorted(reached, key=lambda standing: standing.time_s)


def speed_up(record: TrainRecord, records: Sequence[TrainRecord]) -> float | None:
    """Dense time over the time of `record`: to the target if there is one, else per step."""
    dense = [other for other in records if other.spec == BASELINE]
    if common_target(records) is None:
        return _over(middle(run.step_ms for run in dense), record.step_ms)
    return _over(middle(run.time_to_target_s for run in dense), record.time_to_target_s)


def efficiency(compute_ms: float | None, step_ms: float | None) -> float | None:
    """What N workers get done in a step's time, over N times what one would that need not talk."""
    return compute_ms / step_ms if compute_ms is not None and step_ms else None


def _over(dense: float | None, own: float | None) -> float | None:
    return dense / own if dense is not None and own else None
