"""Predicted steps, with what was measured where it was: frozen records, kept as JSON lines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from laconic.bench.records.files import VERSION, read_kinds
from laconic.bench.records.kinds import FORECAST, KINDS
from laconic.forecast.forecast import Prediction
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


@dataclass(frozen=True)
class Setting:
    """What all records of a run have in common."""

    workload: str
    parameters: int
    rate: str | None
    latency_ms: float | None
    device: str
    command: str
    machine: dict[str, str]

    def record(
        self, spec: str, exchange: str, workers: int, prediction: Prediction
    ) -> ForecastRecord:
        ms = {f"{name[:-2]}_ms": 1e3 * s for name, s in prediction.forecast._asdict().items()}
        return ForecastRecord(
            spec=spec,
            exchange=exchange,
            workers=workers,
            sent_bytes=prediction.sent_bytes,
            calls=prediction.calls,
            **ms,
            **vars(self),
        )


def read_forecasts(path: Path) -> list[ForecastRecord]:
    """The forecasts in a file that may hold other records, too."""
    return read_kinds(path, {FORECAST: ForecastRecord}, KINDS)
