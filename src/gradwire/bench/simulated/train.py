"""`gradwire simulate --steps`: trains simulated workers and records the time on each network."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from gradwire.bench.machine import device_facts, machine_facts
from gradwire.bench.predictions.measured_model import Subject, measure_workload
from gradwire.bench.predictions.simulate import SimulateBench
from gradwire.bench.records.compare import Target
from gradwire.bench.records.files import append
from gradwire.bench.records.schema import TrainRecord
from gradwire.bench.report.tables import train_tables
from gradwire.bench.runs.cluster_run import Place
from gradwire.bench.runs.train_records import TrainCollector
from gradwire.bench.simulated.base import Seen, Trainee, train
from gradwire.bench.simulated.clock import ForecastPace, Pace
from gradwire.bench.simulated.trainer import crew_of
from gradwire.bench.worker.protocol import Finished, Job, Look, Message, Started
from gradwire.bench.workloads.base import parameter_count
from gradwire.comm.cost_model import format_rate
from gradwire.comm.meter import ring_bytes
from gradwire.errors import ConfigError


@dataclass(frozen=True)
class SimulatedRun:
    """A case that is being run; `paces` are by the links' rate."""

    job: Job
    case: str
    paces: Mapping[str, Pace]
    command: str
    facts: Mapping[str, str]
    target: Target | None = None
    compute_ms: float | None = None

    def records(self, trainee: Trainee, seen: Sequence[Seen]) -> list[TrainRecord]:
        """One a rate."""
        return [self._record(trainee, seen, rate, pace) for rate, pace in self.paces.items()]

    def _record(self, trainee: Trainee, seen: Sequence[Seen], rate: str, pace: Pace) -> TrainRecord:
        machine = {**machine_facts(), **self.facts}
        place = Place(trainee.workers, rate, True, self.command, machine)
        collector = TrainCollector(place, self.job, trainee.workload, self.target, self.compute_ms)
        for message in self._messages(trainee, seen, pace):
            record = collector.hear(message)
        assert isinstance(record, TrainRecord)
        title = f"{trainee.workload.heading} (simulated)"
        # The first steps compile kernels and record graphs, and others may be at work here too.
        lockstep_ms = min((one.lockstep_s * 1e3 for one in seen if one.losses), default=None)
        return replace(record, workload=title, simulated=True, lockstep_ms=lockstep_ms)

    def _messages(self, trainee: Trainee, seen: Sequence[Seen], pace: Pace) -> Iterator[Message]:
        """What rank 0 of a real cluster would tell."""
        yield Started(case=self.case)
        for one in seen:
            loss, metric_name, metric = one.evaluation
            yield Look(
                case=self.case,
                step=one.step,
                time_s=pace.time_s(one),
                sent_bytes=one.sent_bytes,
                loss=loss,
                metric_name=metric_name,
                metric=metric,
                losses=one.losses,
            )
        last = seen[-1]
        grad_bytes = sum(p.nbytes for p in trainee.model.parameters() if p.requires_grad)
        yield Finished(
            case=self.case,
            parameters=parameter_count(trainee.model),
            steps_ms=pace.steps_ms(last),
            sent_bytes=last.sent_bytes / last.step,
            dense_bytes=ring_bytes(grad_bytes, trainee.workers),
            **pace.split()._asdict(),
            timeline=trainee.timeline(),
        )


@dataclass(frozen=True)
class SimulatedTrain:
    """Every case from the same start; `bench` says what a step of it takes."""

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
        subject = measure_workload(self.bench.workload, seed=self.seed)
        records: list[TrainRecord] = []
        for workers in self.bench.workers:
            for case in self.bench.cases:
                records += self._train(subject, case, workers)
                if self.bench.json_path is not None:
                    append(self.bench.json_path, records[-1])
        for table in train_tables(records):
            console.print(table)
        for record in records:
            took = f"{record.spec}: a step of {record.workers} workers took"
            console.print(f"{took} {record.lockstep_ms:.1f} ms here", markup=False, highlight=False)
        return records

    def _train(self, subject: Subject, case: str, workers: int) -> list[TrainRecord]:
        workload = self.bench.workload
        job = Job(
            workload=workload.title,
            turns=(case,),
            steps=self.steps,
            warmup=0,
            evaluate_every=self.evaluate_every,
            seed=self.seed,
            device=str(workload.device),
        )
        crew = crew_of(workload, case, workers, self.seed)
        watch = crew.watched(case, lambda plan: self.bench.predict_plan(subject, plan, workers))
        seen = list(train(crew, self.steps, self.evaluate_every))
        rate = format_rate(self.bench.links.rate_bits)
        compute_ms = subject.compute.compute_s * 1e3
        run = SimulatedRun(
            job,
            case,
            {rate: ForecastPace(watch)},
            self.bench.command,
            device_facts(job.device),
            compute_ms=compute_ms,
        )
        return run.records(crew, seen)
