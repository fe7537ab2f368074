"""Finds the finished runs in a file of records, so that an interrupted benchmark resumes."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench.records.files import check_writable
from gradwire.bench.records.schema import TrainRecord, read


@dataclass(frozen=True)
class Setting:
    """What two runs must share, beside case and seed, for one to stand for the other."""

    workload: str
    workload_spec: str
    workers: int
    rate: str | None
    shaped: bool
    steps: int
    device: str


def earlier(path: Path | None, setting: Setting) -> list[TrainRecord]:
    """The runs of this setting that came to their end in a file, which need not be there yet.

    One that diverged has: with the same seed it would do so again.

    Raises if it cannot be read or written, before anything was run for it.
    """
    if path is None:
        return []
    check_writable(path)
    records = (record for record in read([path]) if isinstance(record, TrainRecord))
    return [r for r in records if r.status in ("done", "diverged") and _setting(r) == setting]


def done(records: Iterable[TrainRecord], seed: int) -> set[str]:
    """The cases that are done with this seed."""
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
