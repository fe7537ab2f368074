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
    """Takes the cases in turn, each for some steps.

    With `evaluate_every` a turn is a training run from the start. Without, it is a block of steps
    with a model that is kept, so that a case can have several turns between those of others.
    """

    workload: str
    turns: tuple[str, ...]
    steps: int
    warmup: int
    evaluate_every: int | None = None
    seed: int = 0
    data: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"bench: steps must be at least 1, got {self.steps}")
        if self.seed < 0:
            raise ConfigError(f"bench: seeds must not be negative, got {self.seed}")
        if self.warmup < 0:
            raise ConfigError(f"bench: warmup must not be negative, got {self.warmup}")
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
    """A step is done; not every one is told."""

    kind: Literal["tick"] = "tick"
    case: str
    step: int
    step_ms: float


@dataclass(frozen=True, kw_only=True)
class Look:
    """The model was evaluated while the clock, `time_s`, stood still."""

    kind: Literal["look"] = "look"
    case: str
    step: int
    time_s: float
    sent_bytes: float
    loss: float
    metric_name: str
    metric: float
    losses: tuple[float, ...] = ()
    """Of the steps since the look before, on rank 0's own batches."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A turn is over. Bytes and the split of the time are means per step, on rank 0."""

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


@dataclass(frozen=True, kw_only=True)
class Failed:
    kind: Literal["failed"] = "failed"
    case: str
    error: str


Message: TypeAlias = Started | Tick | Look | Finished | Failed
_KINDS: dict[str, type[Message]] = {
    "started": Started,
    "tick": Tick,
    "look": Look,
    "finished": Finished,
    "failed": Failed,
}


def say(message: Message) -> None:
    print(TAG + json.dumps(to_row(message)), flush=True)


def hear(line: str) -> Message | None:
    """The message in a line of a worker's output, if it is one."""
    if not line.startswith(TAG):
        return None
    row = json.loads(line.removeprefix(TAG))
    return from_row(_KINDS[row["kind"]], row)
