"""`gradwire bench pipeline`: losses of a model whose stages send each other compressed messages.

All stages run in this process with the messages of a real pipeline, so one device is enough. Each
case is a pair of methods, activations and gradients; the baseline is `none / none`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from gradwire.base import OneRound
from gradwire.bench.machine import check_device, device_facts, machine_facts
from gradwire.bench.records.files import append, check_writable
from gradwire.bench.records.schema import Point, TrainRecord
from gradwire.bench.workloads.base import Workload, parameter_count, parse_workload, update
from gradwire.checks import check_whole
from gradwire.errors import ConfigError
from gradwire.stages.method import DIRECTIONS, Direction, stage_method
from gradwire.stages.simulated import SimulatedStages

CASES = ("none / none", "int8 / int8", "int4 / int8", "int4 / int4")
_LAST = 20
"""Steps at the end whose mean loss is the final one: a single batch is noisy."""


@dataclass(frozen=True)
class PipelineBench:
    """Every case with every seed; `cases` are pairs of specs, such as "int4 / int8"."""

    workload: str
    device: str
    stages: int
    microbatches: int
    cases: tuple[str, ...]
    steps: int
    seeds: tuple[int, ...]
    json_path: Path | None
    command: str
    data: Path | None = None

    def __post_init__(self) -> None:
        check_device(self.device)
        check_whole("pipeline", "steps", self.steps, 1)
        check_whole("pipeline", "microbatches", self.microbatches, 1)
        for case in self.cases:
            _methods(case)
        if parse_workload(self.workload).batch_size % self.microbatches:
            raise ConfigError(
                f"pipeline: the batch size must be a multiple of microbatches, got "
                f"{parse_workload(self.workload).batch_size} and {self.microbatches}"
            )

    def run(self, console: Console) -> list[TrainRecord]:
        """Trains with one case after the other, and shows the results."""
        if self.json_path is not None:
            check_writable(self.json_path)
        records = []
        for seed in self.seeds:
            for case in self.cases:
                console.print(f"seed {seed}: {case}", markup=False, highlight=False)
                records.append(self._train(case, seed))
                if self.json_path is not None:
                    append(self.json_path, records[-1])
        console.print(_table(records))
        return records

    def _train(self, case: str, seed: int) -> TrainRecord:
        workload = parse_workload(self.workload, self.data, self.device)
        torch.manual_seed(seed)
        model = workload.build().to(self.device)
        stages = SimulatedStages(
            _layers(workload, model), self.stages, _methods(case), self.microbatches, seed=seed
        )
        optimiser = workload.optimiser(model)
        # Dropout draws the same numbers in every case.
        torch.manual_seed(seed)
        losses, start_s = [], perf_counter()
        for step in range(self.steps):
            losses.append(self._step(workload, model, stages, step, seed))
            update(workload, model, optimiser, step, self.steps)
            optimiser.zero_grad()
        step_s = (perf_counter() - start_s) / self.steps
        found = workload.evaluate(model)
        sent, dense = (
            sum(column) for column in zip(*map(stages.sent_bytes, DIRECTIONS), strict=True)
        )
        point = Point(
            step=self.steps,
            time_s=step_s * self.steps,
            loss=found.loss,
            sent_bytes=sent,
            metric=found.metric,
        )
        return TrainRecord(
            spec=case,
            workload=f"{workload.name}, {self.stages} stages",
            workload_spec=self.workload,
            workers=self.stages,
            rate=None,
            shaped=False,
            seed=seed,
            status="done",
            command=self.command,
            machine={**machine_facts(), **device_facts(self.device)},
            points=(point,),
            sent_bytes=sent / self.steps,
            dense_bytes=dense / self.steps,
            ratio=dense / sent,
            final_loss=fmean(losses[-_LAST:]),
            metric=found.metric,
            metric_name=found.metric_name,
            metric_better=workload.metric.better,
            device=self.device,
            steps=self.steps,
            evaluate_every=self.steps,
            batch=workload.batch_size,
            parameters=parameter_count(model),
            losses=tuple(losses),
            simulated=True,
            lockstep_ms=step_s * 1e3,
        )

    def _step(
        self, workload: Workload, model: nn.Module, stages: SimulatedStages, step: int, seed: int
    ) -> float:
        """Runs the micro-batches of a step; returns their mean loss."""
        inputs, targets = workload.batch(step, 0, 1, seed)
        stages.begin_step()
        total = torch.zeros((), device=self.device)
        pairs = zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True)
        for number, (part, target) in enumerate(pairs):
            stages.begin_microbatch(number)
            loss = workload.loss(model(part), target) / self.microbatches
            loss.backward()
            total += loss.detach()
        return float(total)


def _methods(case: str) -> dict[Direction, OneRound]:
    texts = [text.strip() for text in case.split("/")]
    if len(texts) != len(DIRECTIONS):
        raise ConfigError(f"pipeline: a case is two specs such as 'int4 / int8', got {case!r}")
    return {d: stage_method(d, text) for d, text in zip(DIRECTIONS, texts, strict=True)}


def _layers(workload: Workload, model: nn.Module) -> list[nn.Module]:
    """Returns the blocks between which a model is cut."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential):
        raise ConfigError(f"pipeline: {workload.name} has no blocks to cut; use gpt or gpt2")
    return list(blocks)


def _table(records: Sequence[TrainRecord]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("activations / gradients", "seed", "loss", "held out", "sent a step", "ratio"):
        table.add_column(name, justify="left" if "/" in name else "right")
    for r in records:
        assert r.sent_bytes is not None
        assert r.ratio is not None
        row = f"{r.final_loss:.4f}", f"{r.points[0].loss:.4f}"
        table.add_row(r.spec, str(r.seed), *row, f"{r.sent_bytes:,.0f}", f"{r.ratio:.2f}")
    return table
