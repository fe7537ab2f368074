"""How near predictions are to what was measured, and how good a choice by them would have been."""

from collections.abc import Sequence

from laconic.bench.records.forecasts import ForecastRecord
from laconic.bench.records.setting import group
from laconic.forecast.advice import FP32, WORTH

CHOICE = 0.10
"""What is chosen should take at most so much longer than the fastest."""
LIMIT = 0.15
"""A prediction should be nearer than this to what is measured."""
QUIET_CORES = 0.2
"""Where others use more of the cores that workers need, what is measured says little."""


def summary(records: Sequence[ForecastRecord]) -> str:
    """How good predictions and choices are, and whether the machine was quiet enough to tell."""
    near = [r for r in records if r.off is not None and abs(r.off) <= LIMIT]
    loud = [r for r in records if not is_quiet(r)]
    said = f"{len(near)} of {len(records)} predictions are within {LIMIT:.0%} of what was measured."
    for (workers, rate), loss in choices(records).items():
        if loss > CHOICE:
            said += f" With {workers} workers at {rate} the choice is {loss:.0%} above the fastest."
    if not loud:
        return said
    return (
        f"{said} In {len(loud)} cells other programs used more than {QUIET_CORES:g} cores, and "
        "more than half of those to spare: measure again on a quiet machine."
    )


def is_quiet(record: ForecastRecord) -> bool:
    """Whether workers had their cores for themselves: others may use half of those to spare."""
    spare = max(0, int(record.machine.get("cores", 0)) - record.workers)
    return (record.others_cores or 0) <= max(QUIET_CORES, spare / 2)


def choices(records: Sequence[ForecastRecord]) -> dict[tuple[int, str | None], float]:
    """By which share what `advise` would choose was slower than the fastest, on every cluster.

    It chooses what is predicted to be fastest, if that is worth more than leaving things dense.
    """
    found: dict[tuple[int, str | None], float] = {}
    for cluster, rows in group(records, lambda r: (r.workers, r.rate)).items():
        measured = {r.spec: r.measured_ms for r in rows if r.measured_ms is not None}
        choice = min(rows, key=lambda r: r.step_ms)
        dense = [r for r in rows if r.spec == FP32]
        if dense and dense[0].step_ms <= WORTH * choice.step_ms:
            [choice] = dense
        if choice.spec in measured:
            found[cluster] = measured[choice.spec] / min(measured.values()) - 1
    return found
