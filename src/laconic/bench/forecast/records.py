"""What the forecasts of a run have in common, and forecasts from files."""

from dataclasses import dataclass
from pathlib import Path

from laconic.bench.records.files import read_kinds
from laconic.bench.records.forecasts import ForecastRecord
from laconic.bench.records.kinds import KINDS
from laconic.bench.records.others import FORECAST, OTHERS
from laconic.forecast.forecast import Prediction


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
    others = [kind for kind in (*KINDS, *OTHERS) if kind != FORECAST]
    return read_kinds(path, {FORECAST: ForecastRecord}, others)
