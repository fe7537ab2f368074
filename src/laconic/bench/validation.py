"""`laconic bench validate`: predicted steps beside measured ones, on emulated hosts."""

import json
import sys
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from laconic.bench.forecast_records import ForecastRecord, Setting
from laconic.bench.forecast_tables import validation_table
from laconic.bench.job import Job, write_job
from laconic.bench.jsonl import from_row, to_row
from laconic.bench.machine import machine_facts
from laconic.bench.records import append
from laconic.errors import ConfigError, PeerError
from laconic.forecast.forecast import Prediction
from laconic.forecast.timeline import Forecast
from laconic.network.cluster import open_cluster

CASES = ("none", "efsign", "topk:ratio=0.01", "powersgd:rank=1")
RATES = ("100mbit", "1gbit", "10gbit")
WORKERS = (2, 4, 8)
LIMIT = 0.15
"""A prediction should be nearer than this to what is measured."""
QUIET_CORES = 0.2
"""Where others use more, what is measured says little."""

_ROUNDS = 3
_TAG = "@laconic-cell "
_TAIL_LINES = 5


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One case on one cluster, as a worker tells it."""

    spec: str
    exchange: str
    workload: str
    parameters: int
    forecast_s: tuple[float, ...]
    sent_bytes: float
    calls: float
    beside_s: float
    measured_s: float
    others_cores: float


def say(cell: Cell) -> None:
    print(_TAG + json.dumps(to_row(cell)), flush=True)


@dataclass(frozen=True)
class Validation:
    """Every case at every rate among every number of workers."""

    cases: tuple[str, ...]
    rates: tuple[str | None, ...]
    workers: tuple[int, ...]
    steps: int
    json_path: Path | None
    command: str
    workload: str = "mlp"

    def run(self, console: Console) -> None:
        records: list[ForecastRecord] = []
        for workers in self.workers:
            for rate in self.rates:
                for record in self._cells(workers, rate):
                    records.append(record)
                    if self.json_path is not None:
                        append(self.json_path, record)
                    console.print(_line(record), markup=False, highlight=False)
        console.print(validation_table(records))
        console.print(summary(records), markup=False, highlight=False)

    def _cells(self, workers: int, rate: str | None) -> list[ForecastRecord]:
        job = Job(workload=self.workload, turns=self.cases * _ROUNDS, steps=self.steps, warmup=1)
        heard: list[Cell] = []
        errors: deque[str] = deque(maxlen=_TAIL_LINES)

        def hear(rank: int, line: str) -> None:
            if line.startswith(_TAG):
                heard.append(from_row(Cell, json.loads(line.removeprefix(_TAG))))

        with TemporaryDirectory(prefix="laconic-") as folder, open_cluster(workers, rate) as hosts:
            if rate is not None and not hosts.shaped:
                raise ConfigError(f"validate: {hosts.note}")
            path = Path(folder) / "job.json"
            write_job(path, job)
            command = [sys.executable, "-m", "laconic.bench.validation_worker"]
            code = hosts.launch(
                [*command, "--config", str(path)],
                on_line=hear,
                on_error_line=lambda rank, line: errors.append(f"rank {rank}: {line}"),
            )
        if code:
            raise PeerError(f"the workers ended with code {code}: {' '.join(errors)}")
        return [self._record(cell, workers, rate) for cell in heard]

    def _record(self, cell: Cell, workers: int, rate: str | None) -> ForecastRecord:
        facts = machine_facts()
        setting = Setting(cell.workload, cell.parameters, rate, None, "cpu", self.command, facts)
        predicted = Prediction(Forecast(*cell.forecast_s), cell.sent_bytes, cell.calls)
        record = setting.record(cell.spec, cell.exchange, workers, predicted)
        return replace(
            record,
            beside_others_ms=cell.beside_s * 1e3,
            measured_ms=cell.measured_s * 1e3,
            others_cores=cell.others_cores,
        )


def _line(record: ForecastRecord) -> str:
    return (
        f"{record.spec}, {record.workers} workers, {record.rate}: predicted {record.step_ms:.1f} "
        f"ms, measured {record.measured_ms:.1f} ms"
    )


def summary(records: list[ForecastRecord]) -> str:
    """How many predictions are near enough, and whether the machine was quiet enough to tell."""
    near = [r for r in records if r.off is not None and abs(r.off) <= LIMIT]
    loud = [r for r in records if (r.others_cores or 0) > QUIET_CORES]
    said = f"{len(near)} of {len(records)} predictions are within {LIMIT:.0%} of what was measured."
    if not loud:
        return said
    return (
        f"{said} In {len(loud)} cells other programs used more than {QUIET_CORES:g} cores: "
        "measure again on a quiet machine."
    )
