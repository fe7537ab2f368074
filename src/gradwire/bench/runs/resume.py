"""Finds the finished runs in a file of records, so that an interrupted benchmark resumes."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench.records.files import STANDARD_OUTPUT, check_writable, read
from gradwire.bench.records.schema import TrainRecord


@dataclass(frozen=True)
class Setting:
    """The settings that two runs with equal case and seed must share to be the same run."""

    workload: str
    workload_spec: str
    workers: int
    rate: str | None
    shaped: bool
    steps: int
    device: str


def finished_runs(path: Path | None, setting: Setting) -> list[TrainRecord]:
    """Returns the finished runs of this setting in a file, which need not exist yet.

    A run that diverged is finished: with the same seed it would diverge again.

    Raises if the file cannot be read or written, before anything is run.
    """
    if path is None or path == STANDARD_OUTPUT:
        return []
    check_writable(path)
    records = (record for record in read([path]) if isinstance(record, TrainRecord))
    return [r for r in records if r.status in ("done", "diverged") and _setting(r) == setting]


def finished_cases(records: Iterable[TrainRecord], seed: int) -> set[str]:
    """Returns the cases that are finished with this seed."""
    return {record.spec for record in records if record.seed == seed}


def _setting(record: TrainRecord) -> Setting | None:
    if record.workload_spec is None or record.steps is None:
        return None
    return Setting(
        record.workload,
        record.workload_spec,
        record.workers,
        record.rate,
        record.shaped,
        record.steps,
        record.device,
    )
