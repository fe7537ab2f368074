"""`gradwire bench step`: the step time of many methods in one run.

Methods alternate in blocks of steps, so that noise affects all of them alike; a record holds the
median over all blocks of a case. The time of all blocks is limited: slow cases take fewer steps.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console

from gradwire.bench.machine import check_device
from gradwire.bench.records.bound import StepBound, step_bound
from gradwire.bench.records.compare import efficiency, median_of
from gradwire.bench.records.schema import BASELINE, COMPUTE, Record, Status, StepRecord
from gradwire.bench.report.summary import step_summary
from gradwire.bench.report.tables import step_tables
from gradwire.bench.runs.cluster_run import ClusterRun, Collector, Ending, Provenance
from gradwire.bench.runs.train import baselines_first
from gradwire.bench.worker.protocol import Failed, Finished, Job, Message
from gradwire.bench.workloads.base import parameter_count, parse_workload
from gradwire.errors import ConfigError


@dataclass
class StepCollector(Collector):
    """Makes one record per case, once all its blocks are finished."""

    provenance: Provenance
    batch: int
    parameters: int
    rounds: int
    workload: str | None = None
    device: str = "cpu"
    steps_asked: int | None = None
    blocks: dict[str, list[Finished]] = field(default_factory=lambda: defaultdict(list))
    recorded: set[str] = field(default_factory=set)

    def receive(self, message: Message) -> Record | None:
        if isinstance(message, Failed):
            return self._record(message.case, "failed", message.error)
        if not isinstance(message, Finished):
            return None
        self.blocks[message.case].append(message)
        complete = len(self.blocks[message.case]) == self.rounds
        return self._record(message.case, "done", None) if complete else None

    def unfinished(self) -> list[Record]:
        cases = [case for case in self.blocks if case not in self.recorded]
        return [self._record(case, "interrupted", None) for case in cases]

    def _record(self, case: str, status: Status, error: str | None) -> StepRecord:
        self.recorded.add(case)
        blocks = self.blocks[case]
        steps_ms = _all_steps(blocks)
        step_ms, compute_ms = (
            median_of(steps_ms),
            median_of(_all_steps(self.blocks.get(COMPUTE, []))),
        )
        sent_bytes = median_of(block.sent_bytes for block in blocks)
        received_bytes = median_of(block.received_bytes for block in blocks)
        share = median_of(block.exposed_share for block in blocks)
        exposed_bytes = _exposed(sent_bytes, received_bytes, share)
        bound = self._bound(sent_bytes, received_bytes, exposed_bytes, compute_ms)
        return StepRecord(
            spec=case,
            workers=self.provenance.workers,
            rate=self.provenance.rate,
            shaped=self.provenance.shaped,
            steps=len(steps_ms),
            batch=self.batch,
            parameters=self.parameters,
            status=status,
            error=error,
            command=self.provenance.command,
            machine=self.provenance.machine,
            workload=self.workload,
            device=self.device,
            step_ms=step_ms,
            compute_ms=compute_ms,
            scaling_efficiency=efficiency(compute_ms, step_ms),
            interface_bytes=median_of(block.interface_bytes for block in blocks),
            backend=blocks[-1].backend if blocks else None,
            step_ms_quantiles=_quantiles(steps_ms),
            sent_bytes=sent_bytes,
            ratio_to_dense=self._ratio_to_dense(steps_ms),
            encode_ms=median_of(block.encode_ms for block in blocks),
            wire_ms=median_of(block.wire_ms for block in blocks),
            decode_ms=median_of(block.decode_ms for block in blocks),
            steps_asked=self.steps_asked,
            received_bytes=received_bytes,
            exposed_bytes=exposed_bytes,
            peak_device_bytes=_largest(block.peak_device_bytes for block in blocks),
            bound_wire_ms=bound and bound.wire_ms,
            bound_ms=bound and bound.step_ms,
            ratio_to_bound=step_ms / bound.step_ms if bound and bound.step_ms and step_ms else None,
        )

    def _bound(
        self,
        sent_bytes: float | None,
        received_bytes: float | None,
        exposed_bytes: float | None,
        compute_ms: float | None,
    ) -> StepBound | None:
        """Returns the bound, or None if the links had no rate or the bytes are unknown."""
        rate = self.provenance.rate if self.provenance.shaped else None
        if rate is None or sent_bytes is None or exposed_bytes is None:
            return None
        wire_bytes = max(sent_bytes, received_bytes or 0.0)
        return step_bound(rate, wire_bytes, exposed_bytes, compute_ms)

    def _ratio_to_dense(self, steps_ms: Sequence[float]) -> float | None:
        dense_ms = _all_steps(self.blocks.get(BASELINE, []))
        return median(steps_ms) / median(dense_ms) if steps_ms and dense_ms else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _exposed(
    sent_bytes: float | None, received_bytes: float | None, share: float | None
) -> float | None:
    if sent_bytes is None or share is None:
        return None
    return share * max(sent_bytes, received_bytes or 0.0)


def _all_steps(blocks: Iterable[Finished]) -> list[float]:
    return [step_ms for block in blocks for step_ms in block.steps_ms]


def _quantiles(steps_ms: Sequence[float]) -> tuple[float, float, float] | None:
    if not steps_ms:
        return None
    low, middle_, high = np.quantile(steps_ms, (0.2, 0.5, 0.8)).tolist()
    return low, middle_, high


CASES = (
    BASELINE,
    "torch-fp16",
    "torch-powersgd:rank=1",
    "none",
    "fp16",
    "efsign",
    "qsgd:bits=4",
    "topk:ratio=0.01",
    "randomk:ratio=0.01",
    "powersgd:rank=1",
)
ROUNDS = 3


@dataclass(frozen=True)
class StepBench:
    """`steps` timed steps of every case, in `ROUNDS` blocks; every block has its own warm-up.

    If all blocks together would take longer than `budget_s`, slow cases take fewer steps. Where
    links have a rate, `compute-only` is one of the cases: the bounds need it.
    """

    cases: tuple[str, ...]
    workers: int
    rate: str | None
    steps: int
    warmup: int
    batch: int | None
    json_path: Path | None
    command: str
    workload: str = "mlp"
    data: Path | None = None
    device: str = "cpu"
    commit: str | None = None
    budget_s: float | None = None

    def run(self, console: Console) -> Ending:
        """Measures and shows the table."""
        check_device(self.device)
        if self.budget_s is not None and not 0 < self.budget_s < float("inf"):
            raise ConfigError(
                f"step: minutes must be positive and finite, got {self.budget_s / 60:g}"
            )
        workload = parse_workload(self._workload_spec(), self.data)
        job = Job(
            workload=self._workload_spec(),
            case_order=baselines_first(self._all_cases()) * ROUNDS,
            steps=-(-self.steps // ROUNDS),
            warmup=self.warmup,
            data=None if self.data is None else str(self.data),
            device=self.device,
            budget_s=self.budget_s,
        )
        # Missing data raises here, and not on every host.
        workload.examples()
        cluster_run = ClusterRun(
            job, self.workers, self.rate, self.command, self.json_path, self.commit
        )
        collect = partial(
            StepCollector,
            batch=workload.batch_size,
            parameters=parameter_count(workload.build()),
            rounds=ROUNDS,
            workload=workload.heading,
            device=self.device,
            steps_asked=self.steps,
        )
        results = cluster_run.run(collect, console)
        records = [record for record in results.records if isinstance(record, StepRecord)]
        if records:
            _show(records, console)
        return results.ending

    def _all_cases(self) -> tuple[str, ...]:
        implied = self.rate is not None and COMPUTE not in self.cases
        return (COMPUTE, *self.cases) if implied else self.cases

    def _workload_spec(self) -> str:
        if self.batch is None:
            return self.workload
        return f"{self.workload}{',' if ':' in self.workload else ':'}batch_size={self.batch}"


def _show(records: list[StepRecord], console: Console) -> None:
    for table in step_tables(records):
        console.print(table)
    console.print(step_summary(records), markup=False, highlight=False)
