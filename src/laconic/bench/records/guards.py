"""What guards cost, as `laconic bench guards` measures it."""

from dataclasses import dataclass
from typing import Literal

from laconic.bench.records.files import VERSION


@dataclass(frozen=True, kw_only=True)
class GuardRecord:
    """One guard of one method: `ratio` is the median over rounds of the step with it to without.

    `nan` is the default against nan_policy=ignore, `checksum` is checksum=True against the default.
    """

    kind: Literal["guard"] = "guard"
    version: int = VERSION
    spec: str
    guard: str
    workers: int
    rate: str | None
    shaped: bool
    workload: str
    rounds: int
    steps: int
    """In each round, with and without."""
    without_ms: float
    with_ms: float
    ratio: float
    quartiles: tuple[float, float]
    limit: float
    command: str
    machine: dict[str, str]
