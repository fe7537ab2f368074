"""What one benchmark run measured: frozen records, kept as JSON lines."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from laconic.bench.jsonl import RowError, from_row, to_row
from laconic.bench.machine import machine_facts
from laconic.errors import ConfigError

__all__ = [
    "BASELINE",
    "VERSION",
    "KernelRecord",
    "Point",
    "Record",
    "RunRecord",
    "Status",
    "StepRecord",
    "TrainRecord",
    "append",
    "machine_facts",
    "read",
]

VERSION = 1
BASELINE = "ddp-fp32"

Status = Literal["done", "failed", "diverged", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One look at a training run; `sent_bytes` is what one worker has sent so far."""

    step: int
    time_s: float
    loss: float
    sent_bytes: float


@dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """One training run with one method; what was not measured is None.

    Bytes are per worker. `rate` is the links' rate as given ("100mbit"), and counts only where
    `shaped` says that the links really were limited to it.
    """

    kind: Literal["train"] = "train"
    version: int = VERSION
    spec: str
    workload: str
    workers: int
    rate: str | None
    shaped: bool
    seed: int
    status: Status
    error: str | None = None
    command: str
    machine: dict[str, str]
    points: tuple[Point, ...] = field(default=(), repr=False)
    step_ms: float | None = None
    sent_bytes: float | None = None
    dense_bytes: float | None = None
    ratio: float | None = None
    final_loss: float | None = None
    metric: float | None = None
    metric_name: str | None = None
    target_loss: float | None = None
    time_to_target_s: float | None = None
    encode_ms: float | None = None
    wire_ms: float | None = None
    decode_ms: float | None = None
    simulated: bool = False
    """Workers in lock step in one process; times are predictions for the links that are named."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The step time of one method; `ratio_to_dense` is relative to ddp-fp32 in the same run."""

    kind: Literal["step"] = "step"
    version: int = VERSION
    spec: str
    workers: int
    rate: str | None
    shaped: bool
    steps: int
    batch: int
    parameters: int
    status: Status
    error: str | None = None
    command: str
    machine: dict[str, str]
    step_ms: float | None = None
    step_ms_quantiles: tuple[float, float, float] | None = None
    sent_bytes: float | None = None
    ratio_to_dense: float | None = None
    encode_ms: float | None = None
    wire_ms: float | None = None
    decode_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class KernelRecord:
    """What one method costs at one size.

    `ef_step` takes a gradient and a residual and gives a message and the new residual; `floor` is
    the least that memory traffic allows for that.
    """

    kind: Literal["kernel"] = "kernel"
    version: int = VERSION
    method: str
    spec: str
    device: str
    backend: str
    numel: int
    encode_us: float
    decode_us: float
    decode8_us: float | None
    ef_step_us: float
    payload_bytes: int
    bits_per_element: float
    floor_us: float
    ratio_to_floor: float
    status: Status = "done"
    error: str | None = None
    command: str
    machine: dict[str, str]


RunRecord: TypeAlias = TrainRecord | StepRecord
"""What comes from a run of several workers."""

Record: TypeAlias = RunRecord | KernelRecord
KINDS: dict[str, type[TrainRecord] | type[StepRecord] | type[KernelRecord]] = {
    "train": TrainRecord,
    "step": StepRecord,
    "kernel": KernelRecord,
}


def append(path: Path, record: object) -> None:
    """Adds one line to `path` and waits until it is on disk; earlier lines stay as they are."""
    line = json.dumps(to_row(record), allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            # A killed run may have left half a line; without a newline this record is lost too.
            torn = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
            file.write(("\n" * torn + line).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"cannot write records to {path}: {error.strerror}") from error


def read(paths: Iterable[Path]) -> list[Record]:
    """Every record of every file, in order."""
    return [record for path in paths for record in _read_file(path)]


def _read_file(path: Path) -> list[Record]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no such file of records: {path}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not JSON lines, but a binary file") from None
    except OSError as error:
        raise ConfigError(f"cannot read records from {path}: {error.strerror}") from error
    # Not splitlines(): a JSON string may hold the line breaks that only Unicode knows.
    lines = enumerate(text.split("\n"), start=1)
    return [_parse(line, f"{path} line {number}") for number, line in lines if line.strip()]


def _parse(line: str, where: str) -> Record:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: not a record, expected a JSON object, got {line[:40]!r}")
    kind = row.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{where}: unknown kind {kind!r}, expected {list(KINDS)}")
    if row.get("version") != VERSION:
        raise ConfigError(
            f"{where}: record format version {row.get('version')}, this laconic reads {VERSION}"
        )
    try:
        return from_row(KINDS[kind], row)
    except RowError as error:
        raise ConfigError(f"{where}: {kind} record {error}") from None
