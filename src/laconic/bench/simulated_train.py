"""`laconic simulate --steps`: trains in lock step, with exact bytes and a predicted clock."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from rich.console import Console

from laconic.bench.cases import timeline_of
from laconic.bench.epochs import Epochs
from laconic.bench.forecasts import Subject, controller_of, measure_workload, plan_of
from laconic.bench.job import Job
from laconic.bench.laps import Watch, watch_over
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
from laconic.forecast.timeline import Forecast
from laconic.lanes import Lanes
from laconic.network.rate import format_rate
from laconic.plan import Plan
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
        for message in self._messages(subject, case, workers):
            record = collector.hear(message)
        assert isinstance(record, TrainRecord)
        return replace(record, workload=f"{workload.title} (simulated)", simulated=True)

    def _crew(self, subject: Subject, case: str, workers: int) -> tuple[Crew, Watch]:
        workload = self.bench.workload
        torch.manual_seed(self.seed)
        model = workload.build().to(workload.device)
        tensors = {n: p for n, p in model.named_parameters() if p.requires_grad}
        plan = plan_of(case, tensors, workers, steered=True)
        lanes = [Lanes(plan, tensors, rank, workers, self.seed) for rank in range(workers)]
        simulation = Simulation(lanes)

        def predict(seen: Plan) -> Forecast:
            return self.bench.predict_plan(subject, seen, workers).forecast

        watch = watch_over(simulation, controller_of(case), plan, predict)
        return Crew(workload, model, workload.optimiser(model), simulation, self.seed), watch

    def _messages(self, subject: Subject, case: str, workers: int) -> Iterator[Message]:
        """What rank 0 of a real cluster would tell."""
        crew, watch = self._crew(subject, case, workers)
        epochs = Epochs(crew.workload, workers, self.steps)
        yield Started(case=case)
        yield _look(crew, case, 0, 0.0)
        for step in range(1, self.steps + 1):
            train_step(crew, step - 1, self.steps)
            if (rate := epochs.ended(step)) is not None:
                crew.exchange.epoch_ended(rate)
            if step % self.evaluate_every == 0 or step == self.steps:
                yield _look(crew, case, step, watch.passed_s(step))
        grad_bytes = sum(p.nbytes for p in crew.model.parameters() if p.requires_grad)
        usual = watch.usual()
        yield Finished(
            case=case,
            parameters=parameter_count(crew.model),
            steps_ms=tuple(watch.steps_ms(self.steps)),
            sent_bytes=crew.exchange.network.meters[0].sent_bytes / self.steps,
            dense_bytes=ring_bytes(grad_bytes, crew.workers),
            encode_ms=usual.encode_s * 1e3,
            wire_ms=usual.wire_s * 1e3,
            decode_ms=usual.decode_s * 1e3,
            timeline=timeline_of(crew.exchange.stats()),
        )


def _look(crew: Crew, case: str, step: int, time_s: float) -> Look:
    loss, metric_name, metric = crew.workload.evaluate(crew.model)
    return Look(
        case=case,
        step=step,
        time_s=time_s,
        sent_bytes=crew.exchange.network.meters[0].sent_bytes,
        loss=loss,
        metric_name=metric_name,
        metric=metric,
    )
