"""`gradwire bench validate`: predicted beside measured steps, on emulated hosts.

Summarises the errors of the predictions, and the loss of time of a choice that follows them.
"""

import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from rich.console import Console

from gradwire.bench.machine import machine_facts
from gradwire.bench.predictions.forecast_records import Setting, read_predictions, validation_table
from gradwire.bench.records.compare import group
from gradwire.bench.records.files import append, check_writable, from_row, to_row
from gradwire.bench.records.schema import ForecastRecord
from gradwire.bench.worker.protocol import Job, write_job
from gradwire.bench.workloads.base import parse_workload
from gradwire.errors import ConfigError, PeerError
from gradwire.perfmodel.advise import FP32, WORTH
from gradwire.perfmodel.overlap import StepTimes
from gradwire.perfmodel.predict import Prediction
from gradwire.testbed.cluster import Cluster, open_cluster

MAX_CHOICE_LOSS = 0.10
"""Limit of the share by which the chosen method may be slower than the fastest."""
ERROR_LIMIT = 0.15
"""Limit of the relative error of a prediction."""
MAX_OTHER_CORES = 0.2
"""If other programs use more of the cores that workers need, measurements are unreliable."""


def summary(records: Sequence[ForecastRecord]) -> str:
    """Summarises errors of predictions and choices, and whether the machine was idle enough."""
    accurate = [
        r
        for r in records
        if r.prediction_error is not None and abs(r.prediction_error) <= ERROR_LIMIT
    ]
    busy = [r for r in records if not was_idle(r)]
    text = (
        f"{len(accurate)} of {len(records)} predictions are within {ERROR_LIMIT:.0%} of what was "
        "measured."
    )
    for (workers, rate), loss in choice_losses(records).items():
        if loss > MAX_CHOICE_LOSS:
            text += f" With {workers} workers at {rate} the choice is {loss:.0%} above the fastest."
    if not busy:
        return text
    return (
        f"{text} In {len(busy)} cells other programs used more than {MAX_OTHER_CORES:g} cores, and "
        "more than half of the spare ones: measure again on an idle machine."
    )


def was_idle(record: ForecastRecord) -> bool:
    """Returns True if other programs used at most half of the cores that workers leave spare."""
    spare = max(0, int(record.machine.get("cores", 0)) - record.workers)
    return (record.others_cores or 0) <= max(MAX_OTHER_CORES, spare / 2)


def choice_losses(records: Sequence[ForecastRecord]) -> dict[tuple[int, str | None], float]:
    """Returns, by cluster, the share by which the choice of `advise` was slower than the fastest.

    The choice is the method with the fastest predicted step, if its gain over dense is large
    enough.
    """
    found: dict[tuple[int, str | None], float] = {}
    for cluster, rows in group(records, lambda r: (r.workers, r.rate)).items():
        measured = {r.spec: r.measured_ms for r in rows if r.measured_ms is not None}
        choice = min(rows, key=lambda r: r.step_ms)
        dense = [r for r in rows if r.spec == FP32]
        if dense and dense[0].step_ms <= WORTH * choice.step_ms:
            [choice] = dense
        if choice.spec in measured:
            found[cluster] = measured[choice.spec] / min(measured.values()) - 1
    return found


CASES = ("none", "efsign", "topk:ratio=0.01", "powersgd:rank=1")
RATES = ("100mbit", "1gbit", "10gbit")
WORKERS = (2, 4, 8)

Key: TypeAlias = tuple[str, int, str | None]
"""The key of a cell: case, number of workers, and rate."""

_ROUNDS, _TRIES = 5, 3
_TAG = "@gradwire-cell "
_TAIL_LINES = 5


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One case on one cluster, as a worker reports it."""

    spec: str
    exchange: str
    workload: str
    parameters: int
    step_times_s: tuple[float, ...]
    sent_bytes: float
    calls: float
    beside_others_s: float
    measured_s: float
    others_cores: float


def print_cell(cell: Cell) -> None:
    print(_TAG + json.dumps(to_row(cell)), flush=True)


@dataclass(frozen=True)
class Validation:
    """Predicts and measures every case at every rate for every number of workers."""

    cases: tuple[str, ...]
    rates: tuple[str | None, ...]
    workers: tuple[int, ...]
    steps: int
    json_path: Path | None
    command: str
    workload: str = "mlp"
    commit: str | None = None

    def run(self, console: Console) -> None:
        """Measures the cells that the file lacks, and shows all cells."""
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
        """Returns the cells that an earlier run has measured on an idle machine."""
        if self.json_path is None:
            return {}
        check_writable(self.json_path)
        records, title = read_predictions(self.json_path), parse_workload(self.workload).title
        cells = (r for r in records if r.workload == title and r.measured_ms is not None)
        return {_key(r): r for r in cells if was_idle(r)}

    def _cells(self, cases: Sequence[str], workers: int, rate: str | None) -> list[ForecastRecord]:
        case_order = tuple(cases) * _ROUNDS
        job = Job(workload=self.workload, case_order=case_order, steps=self.steps, warmup=1)
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
        predicted = Prediction(StepTimes(*cell.step_times_s), cell.sent_bytes, cell.calls)
        record = setting.record(cell.spec, cell.exchange, workers, predicted)
        return replace(
            record,
            beside_others_ms=cell.beside_others_s * 1e3,
            measured_ms=cell.measured_s * 1e3,
            others_cores=cell.others_cores,
        )


class _Launch:
    """One set of workers, and the cells that they have reported."""

    def __init__(self) -> None:
        self.code = 0
        self.cells: list[Cell] = []
        self._errors: deque[str] = deque(maxlen=_TAIL_LINES)

    def run(self, hosts: Cluster, job: Job) -> None:
        with TemporaryDirectory(prefix="gradwire-") as folder:
            path = Path(folder) / "job.json"
            write_job(path, job)
            command = [sys.executable, "-m", "gradwire.bench.predictions.validation_worker"]
            self.code = hosts.launch(
                [*command, "--config", str(path)],
                on_line=self._on_line,
                on_error_line=lambda rank, line: self._errors.append(f"rank {rank}: {line}"),
            )

    def tail(self) -> str:
        return "\n".join(self._errors)

    def port_taken(self) -> bool:
        return bool(self.code) and "EADDRINUSE" in self.tail()

    def _on_line(self, rank: int, line: str) -> None:
        if line.startswith(_TAG):
            self.cells.append(from_row(Cell, json.loads(line.removeprefix(_TAG))))


def _key(record: ForecastRecord) -> Key:
    return record.spec, record.workers, record.rate


def _line(record: ForecastRecord) -> str:
    return (
        f"{record.spec}, {record.workers} workers, {record.rate}: predicted {record.step_ms:.1f} "
        f"ms, measured {record.measured_ms:.1f} ms"
    )
