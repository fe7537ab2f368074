"""`gradwire bench integrations`: `none` through each integration against the same loop without.

Steps of both alternate, so that a slowdown of the machine affects both, and each step is compared
with its neighbour. Each is first equally often, since the second finds warm caches.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from json import dumps, loads
from operator import truediv
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.bench.machine import check_device, device_facts, machine_facts
from gradwire.bench.records.schema import OverheadRecord
from gradwire.errors import ConfigError
from gradwire.integrations.ddp import attach
from gradwire.integrations.fsdp import attach_fsdp
from gradwire.integrations.optimizer import handle_of, wrap_optimizer
from gradwire.integrations.reducer import Reducer
from gradwire.optim import AdamW

Step: TypeAlias = Callable[[], None]

Build: TypeAlias = Callable[[], nn.Module]

WIDTH = 1024
LIMIT = 1.03
"""Upper bound of the ratio of step times with and without Gradwire."""
LIMITS: Mapping[str, float] = {"adamw": 1.05}
"""Other upper bounds, by integration."""


class Overhead(NamedTuple):
    """Medians of the time of a step without Gradwire and with, and of the ratio of neighbours."""

    integration: str
    plain_ms: float
    none_ms: float
    ratio: float
    low: float
    """The quartiles of the ratio."""
    high: float
    compared: int
    """The number of ratios."""


class Pair(NamedTuple):
    """A training step without Gradwire, and with."""

    plain: Step
    attached: Step


def _model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def _step(
    model: nn.Module,
    x: Tensor,
    between: Step = lambda: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        between()
        optimizer.step()

    return step


def _flat_mean(model: nn.Module) -> Step:
    """Returns the averaging that a loop without DDP does by hand: one all-reduce."""

    def mean() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        pieces = flat.split([g.numel() for g in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))

    return mean


def _ddp_pair(model: Build, x: Tensor) -> Iterator[Pair]:
    plain, attached = DDP(model()), DDP(model())
    link = attach(attached, "none")
    yield Pair(_step(plain, x), _step(attached, x))
    link.detach()


def _loop_pair(model: Build, x: Tensor) -> Iterator[Pair]:
    by_hand, ours = model(), model()
    reducer = Reducer(ours, "none")
    yield Pair(_step(by_hand, x, _flat_mean(by_hand)), _step(ours, x, reducer.reduce))
    reducer.detach()


def _optimizer_pair(model: Build, x: Tensor) -> Iterator[Pair]:
    by_hand, ours = model(), model()
    optimizer = wrap_optimizer(torch.optim.SGD(ours.parameters(), lr=1e-3), "none", model=ours)
    yield Pair(_step(by_hand, x, _flat_mean(by_hand)), _step(ours, x, optimizer=optimizer))
    handle_of(optimizer).detach()


def _adamw_pair(model: Build, x: Tensor) -> Iterator[Pair]:
    """Yields torch's fused AdamW under DDP, and `gradwire.optim.AdamW` without compression."""
    plain, ours = DDP(model()), DDP(model())
    fused = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    optimizer = AdamW(ours, lr=1e-3)
    yield Pair(_step(plain, x, optimizer=fused), _step(ours, x, optimizer=optimizer))
    optimizer.link.detach()


def _fsdp_pair(weights: str | None, model: Build, x: Tensor) -> Iterator[Pair]:
    from torch.distributed.fsdp import fully_shard

    dense, sharded = model(), model()
    fully_shard(dense)
    fully_shard(sharded)
    shards = attach_fsdp(sharded, "none", weights=weights)
    yield Pair(_step(dense, x), _step(sharded, x))
    shards.detach()


PAIRS: Mapping[str, Callable[[Build, Tensor], Iterator[Pair]]] = {
    "ddp": _ddp_pair,
    "loop": _loop_pair,
    "optimizer": _optimizer_pair,
    "adamw": _adamw_pair,
    "fsdp": partial(_fsdp_pair, None),
    "fsdp-weights": partial(_fsdp_pair, "none"),
}
"""The steps to compare, by integration."""


def compare(
    width: int, steps: int, only: Sequence[str] = (*PAIRS,), device: str = "cpu"
) -> list[Overhead]:
    """Returns the overhead of each integration; call it on all ranks."""
    x = torch.randn(32, width, device=device)
    rows: list[Overhead] = []
    for name in only:
        for pair in PAIRS[name](lambda: _model(width).to(device), x):
            rows.append(_time_steps(name, pair, steps))
    return rows


def _time_steps(name: str, pair: Pair, steps: int) -> Overhead:
    seconds: list[list[float]] = [[], []]
    for number in range(steps + 2):
        for attached in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            _wait_for_device()
            start = perf_counter()
            pair[attached]()
            _wait_for_device()
            seconds[attached].append(perf_counter() - start)
    # The first two steps create buckets and lanes.
    return overhead(name, *(times[2:] for times in seconds))


def overhead(name: str, plain_s: Sequence[float], none_s: Sequence[float]) -> Overhead:
    """Returns the overhead from times of neighbours, at least two of each."""
    low, ratio, high = quantiles(map(truediv, none_s, plain_s), n=4)
    times_ms = 1e3 * median(plain_s), 1e3 * median(none_s)
    return Overhead(name, *times_ms, ratio, low, high, len(plain_s))


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rank(rank: int, bench: "IntegrationBench", folder: str) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if bench.device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=bench.ranks)
    rows = compare(bench.width, bench.steps, bench.only, bench.device)
    if rank == 0:
        Path(folder, "rows").write_text(dumps(rows))
    dist.destroy_process_group()


@dataclass(frozen=True)
class IntegrationBench:
    """Compares steps on processes of this machine, one thread each, or with a GPU each."""

    ranks: int
    steps: int
    width: int = WIDTH
    only: tuple[str, ...] = (*PAIRS,)
    device: str = "cpu"
    trainers: bool = False
    """Also compares steps inside Accelerate, Lightning and Transformers, on a CPU."""
    command: str = ""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("ranks", self.ranks, 1),
            ("steps", self.steps, 2),
            ("width", self.width, 1),
        ):
            if value < least:
                raise ConfigError(f"integrations: {name} must be at least {least}, got {value}")
        check_device(self.device)
        if self.trainers and self.device != "cpu":
            raise ConfigError("integrations: trainers are compared on a CPU; omit --device")
        for name in self.only:
            if name not in PAIRS:
                raise ConfigError(f"integrations: only must be some of {[*PAIRS]}, got {name!r}")

    def run(self) -> list[OverheadRecord]:
        """Runs all comparisons, those inside trainers last; returns a record of each."""
        rows = self._trainers() if self.trainers else []
        if self.only:
            with tempfile.TemporaryDirectory() as folder:
                spawn(_rank, (self, folder), self.ranks)
                text = Path(folder, "rows").read_text()
            rows = [*(Overhead(*row) for row in loads(text)), *rows]
        return [self._record(row) for row in rows]

    def _trainers(self) -> list[Overhead]:
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        module = ("-m", "gradwire.bench.microbench.trainers", "--width", str(self.width))
        words = (*torchrun, "--nproc-per-node", str(self.ranks), *module)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"integrations: the trainers failed:\n{done.stderr[-2000:]}")
        # Trainers print dictionaries of their own.
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"integration"')]
        return [Overhead(**loads(line)) for line in lines]

    def _record(self, row: Overhead) -> OverheadRecord:
        return OverheadRecord(
            integration=row.integration,
            workers=self.ranks,
            device=self.device,
            width=self.width,
            compared=row.compared,
            plain_ms=row.plain_ms,
            none_ms=row.none_ms,
            ratio=row.ratio,
            quartiles=(row.low, row.high),
            limit=LIMITS.get(row.integration, LIMIT),
            command=self.command,
            machine={**machine_facts(), **device_facts(self.device)},
        )


def show(records: Sequence[OverheadRecord], console: Console) -> None:
    """Prints a line per integration."""
    table = Table(box=None, pad_edge=False)
    for name in ("integration", "plain ms", "none ms", "ratio", "quartiles", "limit"):
        table.add_column(name, justify="left" if name == "integration" else "right")
    for record in records:
        times = f"{record.plain_ms:.2f}", f"{record.none_ms:.2f}"
        low, high = record.quartiles
        quartiles = f"{low:.3f} to {high:.3f}"
        ratio = f"{record.ratio:.3f}"
        table.add_row(record.integration, *times, ratio, quartiles, f"{record.limit:.2f}")
    console.print(table)
