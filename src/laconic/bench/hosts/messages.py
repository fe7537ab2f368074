"""What workers tell the launcher, as tagged lines of JSON between whatever else they print."""

import json
from dataclasses import dataclass
from typing import Literal, TypeAlias

from laconic.bench.case import Change
from laconic.bench.records.jsonl import from_row, to_row

TAG = "@laconic "


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
