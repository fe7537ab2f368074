"""Comparison at equal quality: the time to where dense training ends, and who does not get there.

A method may reach an early target fast and then end worse; this shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.bench import human
from gradwire.bench.records.compare import (
    LOSS,
    Target,
    TargetTime,
    common_target,
    group,
    median_of,
    time_to_target,
)
from gradwire.bench.records.schema import BASELINE, TrainRecord

MOST_NAMES = 4
"""Methods that a sentence names; the rest is counted."""


@dataclass(frozen=True)
class Quality:
    """Methods that reached the quality of dense training, fastest first, and those that did not."""

    target: Target
    dense_s: float
    reached: tuple[TargetTime, ...]
    missed: tuple[tuple[str, float | None], ...]
    """Methods with the medians of their last values."""


def equal_quality(records: Sequence[TrainRecord]) -> Quality | None:
    """Compares all methods at dense training's last value; None without a finished dense run."""
    asked = common_target(records)
    name = LOSS if asked is None else asked.name
    runs = group((r for r in records if r.status in ("done", "diverged")), lambda r: r.spec)
    dense = [run for run in runs.pop(BASELINE, []) if run.status == "done"]
    end = median_of(_last(run, name) for run in dense)
    if end is None:
        return None
    target = Target(name, end, "lower" if asked is None else asked.better)
    dense_s = median_of(time_to_target(run.points, target) for run in dense)
    return None if dense_s is None else _compare(runs, target, dense_s)


def _compare(runs: dict[str, list[TrainRecord]], target: Target, dense_s: float) -> Quality:
    reached, missed = [], []
    for spec, own in runs.items():
        times = [time_to_target(run.points, target) for run in own]
        time_s = None if None in times else median_of(times)
        if time_s is None:
            missed.append((spec, median_of(_last(run, target.name) for run in own)))
        else:
            reached.append(TargetTime(spec, time_s))
    by_time = sorted(reached, key=lambda entry: entry.time_s)
    return Quality(target, dense_s, tuple(by_time), tuple(missed))


def _last(record: TrainRecord, name: str) -> float | None:
    if not record.points:
        return None
    return record.points[-1].loss if name == LOSS else record.points[-1].metric


def quality_summary(records: Sequence[TrainRecord]) -> str | None:
    """Summarises `equal_quality` in words; None if there is nothing to compare."""
    found = equal_quality(records)
    if found is None or not (found.reached or found.missed):
        return None
    end, dense = human.digits(found.target.value), human.duration_s(found.dense_s)
    goal = f"{found.target.name} {end}, where dense training ends after {dense}"
    gains = [f"{e.spec} {human.times(found.dense_s / e.time_s)}" for e in found.reached]
    ends = [f"{spec} (ends at {human.digits(last)})" for spec, last in found.missed]
    parts = [f"{_listed(gains)} as fast as dense"] if gains else []
    parts += [f"not reached by {_listed(ends)}"] if ends else []
    return f"At equal quality ({goal}): {'; '.join(parts)}."


def _listed(names: Sequence[str]) -> str:
    left = len(names) - MOST_NAMES
    shown = [*names[:MOST_NAMES], f"{left} others"] if left > 1 else list(names)
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
