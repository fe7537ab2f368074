"""A run on a cluster, from the launcher's side: opens hosts, shows progress, keeps the records."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from rich.console import Console

from gradwire.bench.machine import device_facts, machine_facts
from gradwire.bench.records.files import append, check_writable
from gradwire.bench.records.schema import Record
from gradwire.bench.runs.progress import ProgressDisplay
from gradwire.bench.worker.launch import run_cases
from gradwire.bench.worker.protocol import Job, Message
from gradwire.testbed.cluster import open_cluster


@dataclass(frozen=True)
class Provenance:
    """Cluster, command and machine of the records; the same in all of one benchmark."""

    workers: int
    rate: str | None
    shaped: bool
    command: str
    machine: dict[str, str]


class Collector(ABC):
    """Makes records of the workers' messages."""

    @abstractmethod
    def receive(self, message: Message) -> Record | None:
        """Returns the record of a case that ends with this message, else None."""

    @abstractmethod
    def unfinished(self) -> list[Record]:
        """Returns records of the unfinished cases, when no more messages will come."""


Ending: TypeAlias = Literal["done", "failed", "interrupted"]


class Results(NamedTuple):
    records: list[Record]
    interrupted: bool

    @property
    def ending(self) -> Ending:
        """The overall status: `failed` if any run has failed, though the others continued."""
        if self.interrupted:
            return "interrupted"
        return "failed" if any(record.status == "failed" for record in self.records) else "done"


@dataclass(frozen=True)
class ClusterRun:
    """A job on `workers` hosts with links of `rate`; records go to `json_path` one by one.

    `commit` is written to the records if there is no checkout; `watch` receives every message.
    """

    job: Job
    workers: int
    rate: str | None
    command: str
    json_path: Path | None
    commit: str | None = None
    watch: Callable[[Message], None] | None = None

    def run(self, collect: Callable[[Provenance], Collector], console: Console) -> Results:
        """Runs the job and returns its records; if interrupted, the last ones are unfinished."""
        records: list[Record] = []
        if self.json_path is not None:
            check_writable(self.json_path)
        with open_cluster(self.workers, self.rate) as cluster:
            if cluster.note is not None:
                console.print(f"Note: {cluster.note}", markup=False, highlight=False)
            facts = self._facts()
            provenance = Provenance(self.workers, self.rate, cluster.shaped, self.command, facts)
            collector = collect(provenance)
            cases = list(dict.fromkeys(self.job.case_order))
            rounds = len(self.job.case_order) // len(cases)
            try:
                with ProgressDisplay(console, cases, self.job.steps, rounds) as live:

                    def on_message(message: Message) -> None:
                        live.show(message)
                        if self.watch is not None:
                            self.watch(message)
                        record = collector.receive(message)
                        if record is not None:
                            self._keep(records, record)

                    run_cases(cluster, self.job, on_message)
            except KeyboardInterrupt:
                for record in collector.unfinished():
                    self._keep(records, record)
                return Results(records, interrupted=True)
        return Results(records, interrupted=False)

    def _facts(self) -> dict[str, str]:
        facts = {**machine_facts(), **device_facts(self.job.device)}
        return facts if self.commit is None else {**facts, "commit": self.commit}

    def _keep(self, records: list[Record], record: Record) -> None:
        records.append(record)
        if self.json_path is not None:
            append(self.json_path, record)
