"""Steps of a Keras model, as `python -m laconic.bench.costs.keras_steps` prints them."""

from dataclasses import dataclass
from typing import Literal

from laconic.bench.records.files import VERSION


@dataclass(frozen=True, kw_only=True)
class KerasRecord:
    """The median step of one method; `ratio` is to that of `against` in the same run."""

    kind: Literal["keras"] = "keras"
    version: int = VERSION
    spec: str
    step_ms: float
    ratio: float
    sent_bytes: float | None
    against: str
    workers: int
    rate: str | None
    steps: int
    hidden: int
    batch: int
    tensorflow: str
    command: str = ""
    machine: dict[str, str]
