"""Predicted steps, with what was measured where it was."""

from dataclasses import dataclass
from typing import Literal

from laconic.bench.records.files import VERSION
from laconic.forecast.risk import Level


@dataclass(frozen=True, kw_only=True)
class ForecastRecord:
    """The predicted step of one method; bytes and calls are those of one worker in one step."""

    kind: Literal["forecast"] = "forecast"
    version: int = VERSION
    spec: str
    exchange: str
    workload: str
    parameters: int
    workers: int
    rate: str | None
    latency_ms: float | None
    """None where the links were probed."""
    device: str
    command: str
    machine: dict[str, str]
    step_ms: float
    compute_ms: float
    encode_ms: float
    wire_ms: float
    decode_ms: float
    sent_bytes: float
    calls: float
    measured_ms: float | None = None
    others_cores: float | None = None
    """Cores that other programs used while it was measured."""
    beside_others_ms: float | None = None
    """What would have been predicted for the cores that they left."""
    relative_error: float | None = None
    risk: Level | None = None
    advised: bool | None = None
    """What one step leaves unsaid, what that means for accuracy, and the choice, of an advice."""

    @property
    def off(self) -> float | None:
        """By which share of the measured time the prediction is wrong."""
        return None if self.measured_ms is None else self.step_ms / self.measured_ms - 1
