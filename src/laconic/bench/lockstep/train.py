"""`laconic simulate --steps`: trains in lock step, with exact bytes and a predicted clock."""

from dataclasses import dataclass

from rich.console import Console

from laconic.bench.device import device_facts
from laconic.bench.forecast.simulate import SimulateBench
from laconic.bench.forecast.subject import Subject, measure_workload
from laconic.bench.hosts.job import Job
from laconic.bench.lockstep.crew import crew_of
from laconic.bench.lockstep.pace import ForecastPace
from laconic.bench.lockstep.run import SimulatedRun
from laconic.bench.lockstep.trainee import train
from laconic.bench.records.files import append
from laconic.bench.records.kinds import TrainRecord
from laconic.bench.report.tables import train_tables
from laconic.errors import ConfigError
from laconic.network.rate import format_rate


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
