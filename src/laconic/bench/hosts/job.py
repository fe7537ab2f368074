"""What the workers of a benchmark are told to do: one file that all of them read."""

import json
from dataclasses import dataclass
from pathlib import Path

from laconic.bench.records.jsonl import from_row, to_row
from laconic.errors import ConfigError


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
