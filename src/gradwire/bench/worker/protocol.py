"""The protocol between launcher and workers.

The launcher writes a job file that all workers read. Workers print messages as tagged lines of
JSON, between any other output.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from gradwire.bench.case import Change
from gradwire.bench.records.files import from_row, to_row
from gradwire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Job:
    """The cases that the workers run, each for some steps.

    With `evaluate_every` every entry of `case_order` is a training run from the start. Without, it
    is a block of steps that continues with the case's model, so that cases can alternate.
    """

    workload: str
    case_order: tuple[str, ...]
    steps: int
    warmup: int
    evaluate_every: int | None = None
    seed: int = 0
    data: str | None = None
    device: str = "cpu"
    budget_s: float | None = None
    """The time of all blocks together; slow cases then take fewer steps."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"bench: steps must be at least 1, got {self.steps}")
        if self.seed < 0:
            raise ConfigError(f"bench: seeds must not be negative, got {self.seed}")
        if self.warmup < 0:
            raise ConfigError(f"bench: warmup must not be negative, got {self.warmup}")
        if self.budget_s is not None and self.budget_s < 0:
            raise ConfigError(f"bench: budget_s must not be negative, got {self.budget_s}")
        if self.evaluate_every is not None and self.evaluate_every < 1:
            raise ConfigError(
                f"bench: evaluate_every must be at least 1, got {self.evaluate_every}"
            )


def write_job(path: Path, job: Job) -> None:
    path.write_text(json.dumps(to_row(job)), encoding="utf-8")


def read_job(path: Path) -> Job:
    return from_row(Job, json.loads(path.read_text(encoding="utf-8")))


TAG = "@gradwire "


@dataclass(frozen=True, kw_only=True)
class Started:
    kind: Literal["started"] = "started"
    case: str


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A step is done; only some steps are reported."""

    kind: Literal["tick"] = "tick"
    case: str
    step: int
    step_ms: float


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The model was evaluated; the clock `time_s` does not count the evaluation."""

    kind: Literal["evaluated"] = "evaluated"
    case: str
    step: int
    time_s: float
    sent_bytes: float
    loss: float
    metric_name: str
    metric: float
    losses: tuple[float, ...] = ()
    """Losses of the steps since the previous evaluation, on rank 0's batches."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A case is done. Bytes and the parts of the time are means per step, on rank 0."""

    kind: Literal["finished"] = "finished"
    case: str
    parameters: int
    steps_ms: tuple[float, ...]
    sent_bytes: float
    dense_bytes: float
    encode_ms: float | None
    wire_ms: float | None
    decode_ms: float | None
    interface_bytes: float | None = None
    backend: str | None = None
    timeline: tuple[Change, ...] = ()
    received_bytes: float | None = None
    """None if as many as are sent."""
    exposed_share: float | None = None
    """The share of the bytes that no step can send before its last gradient is known."""
    peak_device_bytes: float | None = None
    """The most memory of the GPU that the session held; None on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    kind: Literal["failed"] = "failed"
    case: str
    error: str


Message: TypeAlias = Started | Tick | Evaluated | Finished | Failed
_KINDS: dict[str, type[Message]] = {
    "started": Started,
    "tick": Tick,
    "evaluated": Evaluated,
    "finished": Finished,
    "failed": Failed,
}


def send(message: Message) -> None:
    print(TAG + json.dumps(to_row(message)), flush=True)


def parse_message(line: str) -> Message | None:
    """Parses a line of a worker's output; None if it is not a message."""
    if not line.startswith(TAG):
        return None
    row = json.loads(line.removeprefix(TAG))
    return from_row(_KINDS[row["kind"]], row)
