"""What one benchmark run measured: frozen records, kept as JSON lines."""

import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias, TypeVar, cast

from laconic.bench.case import Change
from laconic.bench.jsonl import RowError, from_row, to_row
from laconic.bench.machine import machine_facts
from laconic.errors import ConfigError

__all__ = [
    "BASELINE",
    "COMPUTE",
    "FORECAST",
    "KINDS",
    "VERSION",
    "KernelRecord",
    "Point",
    "Record",
    "RunRecord",
    "Status",
    "StepRecord",
    "TrainRecord",
    "append",
    "check_writable",
    "machine_facts",
    "read",
    "read_kinds",
]

R = TypeVar("R")

VERSION = 1
BASELINE = "ddp-fp32"
COMPUTE = "compute-only"

log = logging.getLogger("laconic")

Status = Literal["done", "failed", "diverged", "interrupted"]
Direction = Literal["higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One look at a training run; `sent_bytes` is what one worker has sent so far."""

    step: int
    time_s: float
    loss: float
    sent_bytes: float
    metric: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """One training run with one method; what was not measured is None.

    Bytes are per worker and step. `rate` is the links' rate as given ("100mbit"), and counts only
    where `shaped` says that the links really were limited to it. `interface_bytes` is what the
    operating system saw where `sent_bytes` is what the method says. `compute_ms` is the step
    without communication in the same setting, and `scaling_efficiency` its share of the step: what
    N workers get done over N times what one would. `losses` are of rank 0's batches, every step.
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
    workload_spec: str | None = None
    data: str | None = None
    device: str = "cpu"
    backend: str | None = None
    steps: int | None = None
    evaluate_every: int | None = None
    batch: int | None = None
    parameters: int | None = None
    metric_better: Direction | None = None
    target_metric: float | None = None
    interface_bytes: float | None = None
    compute_ms: float | None = None
    scaling_efficiency: float | None = None
    losses: tuple[float, ...] = field(default=(), repr=False)
    timeline: tuple[Change, ...] = field(default=(), repr=False)
    """What a controller has decided: the last of it, where that was much."""
    simulated: bool = False
    """Workers in lock step in one process; times are predictions for the links that are named."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The step time of one method; `ratio_to_dense` is relative to ddp-fp32 in the same run.

    What is optional means the same as in a training record.
    """

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
    workload: str | None = None
    device: str = "cpu"
    backend: str | None = None
    interface_bytes: float | None = None
    compute_ms: float | None = None
    scaling_efficiency: float | None = None


@dataclass(frozen=True, kw_only=True)
class KernelRecord:
    """What one method costs at one size.

    `ef_step` takes a gradient and a residual and gives a message and the new residual; `floor` is
    the least that memory traffic allows for that. Where the card can do it without the host,
    `ef_step_us` is the time of a CUDA graph, and `ef_step_eager_us` has what the calls cost; else
    both are that, and `graph_error` says why. So for `decode8`, which adds up eight messages.
    `add_us`, on a CPU, is `torch.add(g, r, out=r)`. A method that is no `contraction` may keep no
    residual in training, and is measured with one all the same.
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
    ef_step_by: Literal["graph", "eager"] = "eager"
    ef_step_eager_us: float | None = None
    graph_error: str | None = None
    decode8_eager_us: float | None = None
    decode8_floor_us: float | None = None
    add_us: float | None = None
    ratio_to_add: float | None = None
    contraction: bool | None = None
    status: Status = "done"
    error: str | None = None
    command: str
    machine: dict[str, str]


RunRecord: TypeAlias = TrainRecord | StepRecord
"""What comes from a run of several workers."""

Record: TypeAlias = RunRecord | KernelRecord
KINDS: Mapping[str, type[Record]] = {
    "train": TrainRecord,
    "step": StepRecord,
    "kernel": KernelRecord,
}
FORECAST = "forecast"
"""The kind of `ForecastRecord`."""


def append(path: Path, record: object) -> None:
    """Adds one line to `path` and waits until it is on disk; earlier lines stay as they are."""
    line = json.dumps(to_row(record), allow_nan=False) + "\n"
    with _open(path) as file:
        size = file.tell()
        # A killed run may have left half a line; without a newline this record is lost too.
        torn = size > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
        try:
            _write(file.fileno(), ("\n" * torn + line).encode())
        except OSError as error:
            # Half a record is of no use to anybody.
            with suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise _unwritable(path, error) from error


def check_writable(path: Path) -> None:
    """Raises before hours of work whose records could not be kept."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot write records to {path}: not a regular file")
    _open(path).close()


def _open(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return cast(BinaryIO, path.open("ab+", buffering=0))
    except OSError as error:
        raise _unwritable(path, error) from error


def _write(descriptor: int, content: bytes) -> None:
    """All of it, to the disk itself; what a disk has room for may be less than was asked."""
    while content:
        content = content[os.write(descriptor, content) :]
    os.fsync(descriptor)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write records to {path}: {error.strerror}")


def read(paths: Iterable[Path]) -> list[Record]:
    """Every record of every file, in order; forecasts, which are no runs, are left out."""
    return [record for path in paths for record in read_kinds(path, KINDS, (FORECAST,))]


def read_kinds(path: Path, kinds: Mapping[str, type[R]], others: Collection[str] = ()) -> list[R]:
    """The records of some kinds, where others may be among them."""
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
    rows = [
        (_row(line, f"{path} line {n}"), f"{path} line {n}") for n, line in lines if line.strip()
    ]
    return [
        _record(row, where, kinds)
        for row, where in rows
        if row is not None and row.get("kind") not in others
    ]


def _row(line: str, where: str) -> dict[str, object] | None:
    """The row of a line; None, with a warning, for the half of one that a killed run left."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        if line.startswith('{"kind": "'):
            log.warning("%s: left out, since it is cut off: %s", where, error.msg)
            return None
        raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: not a record, expected a JSON object, got {line[:40]!r}")
    return row


def _record(row: Mapping[str, object], where: str, kinds: Mapping[str, type[R]]) -> R:
    kind = row.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{where}: unknown kind {kind!r}, expected {list(kinds)}")
    if row.get("version") != VERSION:
        raise ConfigError(
            f"{where}: record format version {row.get('version')}, this laconic reads {VERSION}"
        )
    try:
        return from_row(kinds[kind], row)
    except RowError as error:
        raise ConfigError(f"{where}: {kind} record {error}") from None
