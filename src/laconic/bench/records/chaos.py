"""Jobs whose workers are killed again and again, as `tests/faults/chaos.py` plays them."""

from dataclasses import dataclass
from typing import Literal

from laconic.bench.records.files import VERSION


@dataclass(frozen=True, kw_only=True)
class KillRecord:
    """One kill, and what became of the others; `detected_s` is -1 where nobody noticed."""

    kind: Literal["kill"] = "kill"
    version: int = VERSION
    kill: int
    rank: int
    step: int
    phase: str
    resumed_from: int
    detected_s: float
    errors: dict[str, int]
    ended: bool
    """Whether all others ended by themselves, with an error."""
    threads_left: int


@dataclass(frozen=True, kw_only=True)
class ChaosRecord:
    """What all kills of a job came to, beside a job that was left alone."""

    kind: Literal["chaos"] = "chaos"
    version: int = VERSION
    kills: int
    seed: int
    spec: str
    workers: int
    rate: str
    timeout_s: float
    detected: int
    max_detected_s: float
    ended: int
    wrong_losses: int
    corrupted_checkpoints: int
    unfinished_files_ignored: int
    same_weights: bool
    took_s: float
    command: str = ""
    machine: dict[str, str]
