"""Simulated workers of a workload with a method that talks rarely: losses, metric and bytes.

`python -m laconic.bench.local_study --help` runs cases of this file and writes JSON lines.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.bench.workload import Workload, parse_workload, update
from laconic.comm.meter import ring_bytes
from laconic.local import CSER, DiLoCo, QsparseLocalSGD, Seat, SparseLoCo, simulated
from laconic.local.steps import LocalSteps

Method: TypeAlias = Callable[[nn.Module, Optimizer, Seat], LocalSteps]
"""A method around one worker's optimiser."""


class Row(NamedTuple):
    """Where a run stands after so many steps; bytes are those of one worker since the start."""

    step: int
    loss: float
    """Mean training loss of the workers since the last row."""
    evaluation_loss: float
    metric: float
    sent_bytes: int
    message_bytes: int
    dense_bytes: int


def cser_cases(ratio: int, updates: int, errors: int, gap: int, qsparse: int) -> dict[str, Method]:
    """CSER, error feedback at every step, and Qsparse, all at the same overall ratio."""

    def blocks(ratio: int) -> str:
        return f"grbs:ratio={1 / ratio!r},block=256"

    return {
        f"cser-{ratio}": lambda m, o, s: CSER(
            m, o, blocks(updates), blocks(errors), sync_every=gap, process_group=s
        ),
        f"ef-{ratio}": lambda m, o, s: QsparseLocalSGD(
            m, o, blocks(ratio), sync_every=1, process_group=s
        ),
        f"qsparse-{ratio}": lambda m, o, s: QsparseLocalSGD(
            m, o, blocks(qsparse), sync_every=8, process_group=s
        ),
    }


def qsparse_case(spec: str, sync_every: int) -> Method:
    return lambda m, o, s: QsparseLocalSGD(m, o, spec, sync_every=sync_every, process_group=s)


CASES: Mapping[str, Method | None] = {
    "dense": None,
    "topk": qsparse_case("topk:ratio=0.01,values=fp32", 1),
    "qtopk": qsparse_case("topk:ratio=0.01 | qsgd:bits=4", 8),
    "signtopk": qsparse_case("topk:ratio=0.01 | sign", 8),
    **cser_cases(32, updates=64, errors=4, gap=16, qsparse=4),
    **cser_cases(256, updates=512, errors=16, gap=32, qsparse=32),
    **cser_cases(1024, updates=2048, errors=8, gap=256, qsparse=128),
    "diloco": lambda m, o, s: DiLoCo(m, o, sync_every=30, process_group=s),
    "sparseloco": lambda m, o, s: SparseLoCo(m, o, sync_every=30, process_group=s),
}
"""What the issue's claims are about; None is the dense mean of all gradients at every step."""


def study(
    workload: Workload, method: Method | None, *, workers: int, steps: int, every: int, seed: int
) -> Iterator[Row]:
    """A row every so many steps and at the end, evaluated on the mean of all models."""
    crew = (
        _Dense(workload, workers, seed)
        if method is None
        else _Crew(workload, method, workers, seed)
    )
    total, count = 0.0, 0
    with crew:
        for step in range(steps):
            total, count = total + crew.step(step, steps), count + 1
            if (step + 1) % every == 0 or step + 1 == steps:
                yield crew.row(step + 1, total / count)
                total, count = 0.0, 0


def bytes_to(rows: Iterable[Row], workload: Workload, target: float) -> int | None:
    """What a worker had sent when the metric was first as good as the target; None if never."""
    higher = workload.metric.better == "higher"
    for row in rows:
        if row.metric >= target if higher else row.metric <= target:
            return row.sent_bytes
    return None


class _Crew:
    """Workers with a model each, in lock step."""

    def __init__(self, workload: Workload, method: Method, workers: int, seed: int) -> None:
        self.workload, self.seed = workload, seed
        self.models = [_model(workload, seed) for _ in range(workers)]
        self.optimisers = [workload.optimiser(model) for model in self.models]
        seats = simulated(workers)
        trios = zip(self.models, self.optimisers, seats, strict=True)
        self.members = [method(*trio) for trio in trios]
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for member in self.members:
            self._stack.enter_context(member)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self, step: int, steps: int) -> float:
        """Every worker's step; their mean loss."""
        losses = []
        for rank, (model, own) in enumerate(zip(self.models, self.optimisers, strict=True)):
            batch = self.workload.batch(step, rank, len(self.models), self.seed)
            own.zero_grad()
            loss = self.workload.loss(model(batch.inputs), batch.targets)
            loss.backward()
            update(self.workload, model, own, step, steps)
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def row(self, step: int, loss: float) -> Row:
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.averaged())
            seen = self.workload.evaluate(self.models[0])
        stats = self.members[0].stats()
        sent, said, dense = (
            int(str(stats[k])) for k in ("sent_bytes", "message_bytes", "dense_bytes")
        )
        return Row(step, loss, seen.loss, seen.metric, sent, said, dense)


class _Dense:
    """One model, by the mean of all workers' gradients at every step."""

    def __init__(self, workload: Workload, workers: int, seed: int) -> None:
        self.workload, self.workers, self.seed = workload, workers, seed
        self.model = _model(workload, seed)
        self.optimiser = workload.optimiser(self.model)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, step: int, steps: int) -> float:
        self.optimiser.zero_grad()
        losses = []
        for rank in range(self.workers):
            batch = self.workload.batch(step, rank, self.workers, self.seed)
            loss = self.workload.loss(self.model(batch.inputs), batch.targets)
            (loss / self.workers).backward()
            losses.append(loss.detach())
        update(self.workload, self.model, self.optimiser, step, steps)
        return float(torch.stack(losses).mean())

    def row(self, step: int, loss: float) -> Row:
        seen = self.workload.evaluate(self.model)
        nbytes = sum(p.nbytes for p in self.model.parameters())
        sent = step * ring_bytes(nbytes, self.workers)
        return Row(step, loss, seen.loss, seen.metric, sent, step * nbytes, sent)


def _model(workload: Workload, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return workload.build().to(workload.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", help="such as resnet9, or gpt-tiny")
    parser.add_argument("cases", nargs="+", choices=sorted(CASES))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True, help="lines are added to this file")
    said = parser.parse_args()
    workload = parse_workload(said.workload, said.data, said.device)
    counts = {key: getattr(said, key) for key in ("workers", "steps", "every", "seed")}
    with said.json.open("a") as file:
        for case in said.cases:
            for row in study(workload, CASES[case], **counts):
                line = {"workload": said.workload, "case": case, **counts, **row._asdict()}
                file.write(json.dumps(line) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
