"""Training on links that change their rate, as `python -m laconic.bench.follow` measures it."""

from dataclasses import dataclass
from typing import Literal

from laconic.bench.case import Change
from laconic.bench.records.files import VERSION


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of steps at one rate; the median of the second half shows where it led."""

    rate: str
    first: int
    """The step from which on the links had this rate, give or take what passes in 0.2 s."""
    steps: int
    seconds: float
    settled_ms: float
    setting: str | None
    """Where a controller had settled at the end."""


@dataclass(frozen=True, kw_only=True)
class FollowRecord:
    """One case through all phases."""

    kind: Literal["follow"] = "follow"
    version: int = VERSION
    spec: str
    workload: str
    workers: int
    phases: tuple[Phase, ...]
    timeline: tuple[Change, ...]
    command: str
    machine: dict[str, str]
