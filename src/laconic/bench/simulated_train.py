"""`laconic simulate --steps`: trains in lock step, with exact bytes and a predicted clock."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from rich.console import Console

from laconic.bench.forecasts import Subject, measure_workload, plan_of
from laconic.bench.job import Job
from laconic.bench.lockstep import Crew, train_step
from laconic.bench.machine import machine_facts
from laconic.bench.messages import Finished, Look, Message, Started
from laconic.bench.race import Place
from laconic.bench.records import TrainRecord, append
from laconic.bench.simulate_bench import SimulateBench
from laconic.bench.tables import train_tables
from laconic.bench.train_records import TrainCollector
from laconic.bench.workload import parameter_count
from laconic.comm.meter import ring_bytes
from laconic.errors import ConfigError
from laconic.forecast.forecast import Prediction
from laconic.lanes import Lanes
from laconic.network.rate import format_rate
from laconic.simulate import Simulation


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
        subject = measure_workload(self.bench.workload, seed=self.seed)
        records: list[TrainRecord] = []
        for workers in self.bench.workers:
            for case in self.bench.cases:
                records.append(self._train(subject, case, workers))
                if self.bench.json_path is not None:
                    append(self.bench.json_path, records[-1])
        for table in train_tables(records):
            console.print(table)
        return records

    def _train(self, subject: Subject, case: str, workers: int) -> TrainRecord:
        predicted = self.bench.predict(subject, case, workers)
        rate = format_rate(self.bench.links.rate_bits)
        place = Place(workers, rate, True, self.bench.command, machine_facts())
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
        collector = TrainCollector(place, job, workload, None)
        for message in self._messages(self._crew(case, workers), case, predicted):
            record = collector.hear(message)
        assert isinstance(record, TrainRecord)
        return replace(record, workload=f"{workload.title} (simulated)", simulated=True)

    def _crew(self, case: str, workers: int) -> Crew:
        workload = self.bench.workload
        torch.manual_seed(self.seed)
        model = workload.build().to(workload.device)
        tensors = {n: p for n, p in model.named_parameters() if p.requires_grad}
        plan = plan_of(case, tensors, workers)
        lanes = [Lanes(plan, tensors, rank, workers, self.seed) for rank in range(workers)]
        return Crew(workload, model, workload.optimiser(model), Simulation(lanes), self.seed)

    def _messages(self, crew: Crew, case: str, predicted: Prediction) -> Iterator[Message]:
        """What rank 0 of a real cluster would tell."""
        step_ms = predicted.forecast.step_s * 1e3
        yield Started(case=case)
        yield _look(crew, case, 0, step_ms)
        for step in range(1, self.steps + 1):
            train_step(crew, step - 1, self.steps)
            if step % self.evaluate_every == 0 or step == self.steps:
                yield _look(crew, case, step, step_ms)
        grad_bytes = sum(p.nbytes for p in crew.model.parameters() if p.requires_grad)
        yield Finished(
            case=case,
            parameters=parameter_count(crew.model),
            steps_ms=(step_ms,) * self.steps,
            sent_bytes=crew.exchange.network.meters[0].sent_bytes / self.steps,
            dense_bytes=ring_bytes(grad_bytes, crew.workers),
            encode_ms=predicted.forecast.encode_s * 1e3,
            wire_ms=predicted.forecast.wire_s * 1e3,
            decode_ms=predicted.forecast.decode_s * 1e3,
        )


def _look(crew: Crew, case: str, step: int, step_ms: float) -> Look:
    loss, metric_name, metric = crew.workload.evaluate(crew.model)
    return Look(
        case=case,
        step=step,
        time_s=step * step_ms / 1e3,
        sent_bytes=crew.exchange.network.meters[0].sent_bytes,
        loss=loss,
        metric_name=metric_name,
        metric=metric,
    )
