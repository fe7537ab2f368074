"""`laconic bench validate`: predicted steps beside measured ones, on emulated hosts."""

import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from rich.console import Console

from laconic.bench.forecast.records import Setting, read_forecasts
from laconic.bench.forecast.tables import validation_table
from laconic.bench.forecast.verdict import is_quiet, summary
from laconic.bench.hosts.job import Job, write_job
from laconic.bench.machine import machine_facts
from laconic.bench.records.files import append, check_writable
from laconic.bench.records.forecasts import ForecastRecord
from laconic.bench.records.jsonl import from_row, to_row
from laconic.bench.work.workload import parse_workload
from laconic.errors import ConfigError, PeerError
from laconic.forecast.forecast import Prediction
from laconic.forecast.timeline import Forecast
from laconic.network.cluster import Cluster, open_cluster

CASES = ("none", "efsign", "topk:ratio=0.01", "powersgd:rank=1")
RATES = ("100mbit", "1gbit", "10gbit")
WORKERS = (2, 4, 8)

Key: TypeAlias = tuple[str, int, str | None]
"""What a cell is about: the case, the number of workers, and the rate."""

_ROUNDS, _TRIES = 5, 3
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
    commit: str | None = None

    def run(self, console: Console) -> None:
        """Measures what the file does not have yet, and shows all that it has then."""
        done = self._earlier()
        for workers in self.workers:
            for rate in self.rates:
                left = [case for case in self.cases if (case, workers, rate) not in done]
                for record in self._cells(left, workers, rate) if left else ():
                    done[_key(record)] = record
                    if self.json_path is not None:
                        append(self.json_path, record)
                    console.print(_line(record), markup=False, highlight=False)
        records = [done[key] for key in self._keys()]
        console.print(validation_table(records))
        console.print(summary(records), markup=False, highlight=False)

    def _keys(self) -> list[Key]:
        return [(c, n, rate) for n in self.workers for rate in self.rates for c in self.cases]

    def _earlier(self) -> dict[Key, ForecastRecord]:
        """Cells that an earlier run has measured on a machine that was quiet."""
        if self.json_path is None:
            return {}
        check_writable(self.json_path)
        records, title = read_forecasts(self.json_path), parse_workload(self.workload).title
        cells = (r for r in records if r.workload == title and r.measured_ms is not None)
        return {_key(r): r for r in cells if is_quiet(r)}

    def _cells(self, cases: Sequence[str], workers: int, rate: str | None) -> list[ForecastRecord]:
        turns = tuple(cases) * _ROUNDS
        job = Job(workload=self.workload, turns=turns, steps=self.steps, warmup=1)
        for _ in range(_TRIES):
            launch = _Launch()
            with open_cluster(workers, rate) as hosts:
                if rate is not None and not hosts.shaped:
                    raise ConfigError(f"validate: {hosts.note}")
                launch.run(hosts, job)
            if not launch.port_taken():
                break
        if launch.code:
            raise PeerError(f"the workers ended with code {launch.code}: {launch.tail()}")
        return [self._record(cell, workers, rate) for cell in launch.cells]

    def _record(self, cell: Cell, workers: int, rate: str | None) -> ForecastRecord:
        facts = machine_facts()
        if self.commit is not None:
            facts["commit"] = self.commit
        setting = Setting(cell.workload, cell.parameters, rate, None, "cpu", self.command, facts)
        predicted = Prediction(Forecast(*cell.forecast_s), cell.sent_bytes, cell.calls)
        record = setting.record(cell.spec, cell.exchange, workers, predicted)
        return replace(
            record,
            beside_others_ms=cell.beside_s * 1e3,
            measured_ms=cell.measured_s * 1e3,
            others_cores=cell.others_cores,
        )


class _Launch:
    """One set of workers, and what they have told."""

    def __init__(self) -> None:
        self.code = 0
        self.cells: list[Cell] = []
        self._errors: deque[str] = deque(maxlen=_TAIL_LINES)

    def run(self, hosts: Cluster, job: Job) -> None:
        with TemporaryDirectory(prefix="laconic-") as folder:
            path = Path(folder) / "job.json"
            write_job(path, job)
            command = [sys.executable, "-m", "laconic.bench.forecast.validation_worker"]
            self.code = hosts.launch(
                [*command, "--config", str(path)],
                on_line=self._hear,
                on_error_line=lambda rank, line: self._errors.append(f"rank {rank}: {line}"),
            )

    def tail(self) -> str:
        return "\n".join(self._errors)

    def port_taken(self) -> bool:
        return bool(self.code) and "EADDRINUSE" in self.tail()

    def _hear(self, rank: int, line: str) -> None:
        if line.startswith(_TAG):
            self.cells.append(from_row(Cell, json.loads(line.removeprefix(_TAG))))


def _key(record: ForecastRecord) -> Key:
    return record.spec, record.workers, record.rate


def _line(record: ForecastRecord) -> str:
    return (
        f"{record.spec}, {record.workers} workers, {record.rate}: predicted {record.step_ms:.1f} "
        f"ms, measured {record.measured_ms:.1f} ms"
    )
