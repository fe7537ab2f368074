"""What became of hostile messages, as `laconic bench fuzz` counts it."""

from dataclasses import dataclass
from typing import Literal

from laconic.bench.records.files import VERSION


@dataclass(frozen=True, kw_only=True)
class FuzzRecord:
    """The messages to one method: each is decoded or refused, or it is a crash."""

    kind: Literal["fuzz"] = "fuzz"
    version: int = VERSION
    spec: str
    ways: tuple[str, ...]
    """The exchanges in which they came."""
    messages: int
    decoded: int
    refused: int
    crashes: int
    crash_texts: tuple[str, ...]
    """Of the first few."""
    cpu_s: float
    peak_grown_kb: int
    seed: int
    command: str
    machine: dict[str, str]
