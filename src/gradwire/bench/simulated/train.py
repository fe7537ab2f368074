"""`gradwire simulate --steps`: trains simulated workers and records the time on each network."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from gradwire.bench.machine import device_facts, machine_facts
from gradwire.bench.predictions.measured_model import MeasuredModel, measure_workload
from gradwire.bench.predictions.simulate import SimulateBench
from gradwire.bench.records.compare import Target
from gradwire.bench.records.files import append
from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.report.tables import train_tables
from gradwire.bench.runs.cluster_run import Provenance
from gradwire.bench.runs.train_records import TrainCollector
from gradwire.bench.simulated.base import SimulatedTrainer, Snapshot, train
from gradwire.bench.simulated.clock import PredictedRunClock, RunClock
from gradwire.bench.simulated.trainer import exchange_trainer
from gradwire.bench.worker.protocol import Evaluated, Finished, Job, Message, Started
from gradwire.bench.workloads.base import parameter_count
from gradwire.comm.cost_model import format_rate
from gradwire.comm.meter import ring_bytes
from gradwire.errors import ConfigError


@dataclass(frozen=True)
class SimulatedRun:
    """A simulated run of one case; `clocks` are by the links' rate."""

    job: Job
    case: str
    clocks: Mapping[str, RunClock]
    command: str
    facts: Mapping[str, str]
    target: Target | None = None
    compute_ms: float | None = None

    def records(
        self, trainer: SimulatedTrainer, snapshots: Sequence[Snapshot]
    ) -> list[TrainRecord]:
        """Returns one record per rate."""
        return [
            self._record(trainer, snapshots, rate, clock) for rate, clock in self.clocks.items()
        ]

    def _record(
        self, trainer: SimulatedTrainer, snapshots: Sequence[Snapshot], rate: str, clock: RunClock
    ) -> TrainRecord:
        machine = {**machine_facts(), **self.facts}
        provenance = Provenance(trainer.workers, rate, True, self.command, machine)
        collector = TrainCollector(
            provenance, self.job, trainer.workload, self.target, self.compute_ms
        )
        for message in self._messages(trainer, snapshots, clock):
            record = collector.receive(message)
        assert isinstance(record, TrainRecord)
        title = f"{trainer.workload.heading} (simulated)"
        # The minimum, since the first steps compile kernels and capture graphs, and other programs
        # may use the device.
        lockstep_ms = min(
            (snapshot.lockstep_s * 1e3 for snapshot in snapshots if snapshot.losses), default=None
        )
        return replace(record, workload=title, simulated=True, lockstep_ms=lockstep_ms)

    def _messages(
        self, trainer: SimulatedTrainer, snapshots: Sequence[Snapshot], clock: RunClock
    ) -> Iterator[Message]:
        """Yields the messages that rank 0 of a real cluster would send."""
        yield Started(case=self.case)
        for snapshot in snapshots:
            loss, metric_name, metric = snapshot.evaluation
            yield Evaluated(
                case=self.case,
                step=snapshot.step,
                time_s=clock.time_s(snapshot),
                sent_bytes=snapshot.sent_bytes,
                loss=loss,
                metric_name=metric_name,
                metric=metric,
                losses=snapshot.losses,
            )
        last = snapshots[-1]
        grad_bytes = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
        yield Finished(
            case=self.case,
            parameters=parameter_count(trainer.model),
            steps_ms=clock.steps_ms(last),
            sent_bytes=last.sent_bytes / last.step,
            dense_bytes=ring_bytes(grad_bytes, trainer.workers),
            **clock.split()._asdict(),
            timeline=trainer.timeline(),
        )


@dataclass(frozen=True)
class SimulatedTrain:
    """Trains every case from the same start; `bench` predicts its step times."""

    bench: SimulateBench
    steps: int
    evaluate_every: int
    seed: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"simulate: steps must be at least 1, got {self.steps}")
        if self.evaluate_every < 1:
            text = f"evaluate_every must be at least 1, got {self.evaluate_every}"
            raise ConfigError(f"simulate: {text}")

    def run(self, console: Console) -> list[TrainRecord]:
        """Trains, shows the table, and writes the records one by one."""
        self.bench.check_writable()
        measured = measure_workload(self.bench.workload, seed=self.seed)
        records: list[TrainRecord] = []
        for workers in self.bench.workers:
            for case in self.bench.cases:
                records += self._train(measured, case, workers)
                if self.bench.json_path is not None:
                    append(self.bench.json_path, records[-1])
        for table in train_tables(records):
            console.print(table)
        for record in records:
            took = f"{record.spec}: a step of {record.workers} workers took"
            console.print(f"{took} {record.lockstep_ms:.1f} ms here", markup=False, highlight=False)
        return records

    def _train(self, measured: MeasuredModel, case: str, workers: int) -> list[TrainRecord]:
        workload = self.bench.workload
        job = Job(
            workload=workload.title,
            case_order=(case,),
            steps=self.steps,
            warmup=0,
            evaluate_every=self.evaluate_every,
            seed=self.seed,
            device=str(workload.device),
        )
        trainer = exchange_trainer(workload, case, workers, self.seed)
        times = trainer.track_times(
            case,
            lambda plan: self.bench.predict_plan(measured, plan, workers),
            self.bench.links.network().link,
        )
        snapshots = list(train(trainer, self.steps, self.evaluate_every))
        rate = format_rate(self.bench.links.rate_bits)
        compute_ms = measured.compute.compute_s * 1e3
        run = SimulatedRun(
            job,
            case,
            {rate: PredictedRunClock(times)},
            self.bench.command,
            device_facts(job.device),
            compute_ms=compute_ms,
        )
        return run.records(trainer, snapshots)
