"""`gradwire bench integrations`: `none` through each integration against the same loop without.

Steps of both alternate, so that a slowdown of the machine affects both, and each step is compared
with its neighbour. Each is first equally often, since the second finds warm caches.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

from gradwire.errors import ConfigError
from gradwire.integrations.ddp import attach
from gradwire.integrations.fsdp import attach_fsdp
from gradwire.integrations.optimizer import handle_of, wrap_optimizer
from gradwire.integrations.reducer import Reducer

Step: TypeAlias = Callable[[], None]

WIDTH = 1024
LIMIT = 1.03
"""Upper bound of the ratio of step times with and without Gradwire."""


class Overhead(NamedTuple):
    """Medians of the time of a step without Gradwire and with, and of the ratio of neighbours."""

    integration: str
    plain_ms: float
    none_ms: float
    ratio: float
    low: float
    """The quartiles of the ratio."""
    high: float


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


def pairs(width: int) -> Iterator[tuple[str, Pair]]:
    """Yields the steps to compare, by integration."""
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(32, width)
    plain, attached = DDP(_model(width)), DDP(_model(width))
    link = attach(attached, "none")
    yield "ddp", Pair(_step(plain, x), _step(attached, x))
    link.detach()
    by_hand, ours = _model(width), _model(width)
    reducer = Reducer(ours, "none")
    yield "loop", Pair(_step(by_hand, x, _flat_mean(by_hand)), _step(ours, x, reducer.reduce))
    reducer.detach()
    by_hand, ours = _model(width), _model(width)
    optimizer = wrap_optimizer(torch.optim.SGD(ours.parameters(), lr=1e-3), "none", model=ours)
    yield (
        "optimizer",
        Pair(_step(by_hand, x, _flat_mean(by_hand)), _step(ours, x, optimizer=optimizer)),
    )
    handle_of(optimizer).detach()
    dense, sharded = _model(width), _model(width)
    fully_shard(dense)
    fully_shard(sharded)
    shards = attach_fsdp(sharded, "none")
    yield "fsdp", Pair(_step(dense, x), _step(sharded, x))
    shards.detach()


def compare(width: int, steps: int) -> list[Overhead]:
    """Returns the overhead of each integration; call it on all ranks."""
    rows: list[Overhead] = []
    for name, pair in pairs(width):
        seconds: list[list[float]] = [[], []]
        for number in range(steps + 2):
            for attached in (0, 1) if number % 2 else (1, 0):
                dist.barrier()
                start = perf_counter()
                pair[attached]()
                seconds[attached].append(perf_counter() - start)
        # The first two steps create buckets and lanes.
        plain_s, none_s = (times[2:] for times in seconds)
        low, ratio, high = quantiles(map(truediv, none_s, plain_s), n=4)
        rows.append(Overhead(name, 1e3 * median(plain_s), 1e3 * median(none_s), ratio, low, high))
    return rows


def _rank(rank: int, ranks: int, width: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    rows = compare(width, steps)
    if rank == 0:
        Path(folder, "rows").write_text(dumps(rows))
    dist.destroy_process_group()


@dataclass(frozen=True)
class IntegrationBench:
    """Compares steps on processes of this machine, one thread each."""

    ranks: int
    steps: int
    width: int = WIDTH

    def __post_init__(self) -> None:
        for name, value, least in (
            ("ranks", self.ranks, 1),
            ("steps", self.steps, 2),
            ("width", self.width, 1),
        ):
            if value < least:
                raise ConfigError(f"integrations: {name} must be at least {least}, got {value}")

    def run(self) -> list[Overhead]:
        with tempfile.TemporaryDirectory() as folder:
            spawn(_rank, (self.ranks, self.width, self.steps, folder), self.ranks)
            return [Overhead(*row) for row in loads(Path(folder, "rows").read_text())]


def show(rows: Sequence[Overhead], console: Console) -> None:
    """Prints a line per integration."""
    table = Table(box=None, pad_edge=False)
    for name in ("integration", "plain ms", "none ms", "ratio", "quartiles", "limit"):
        table.add_column(name, justify="left" if name == "integration" else "right")
    for row in rows:
        times = f"{row.plain_ms:.2f}", f"{row.none_ms:.2f}"
        quartiles = f"{row.low:.3f} to {row.high:.3f}"
        table.add_row(row.integration, *times, f"{row.ratio:.3f}", quartiles, f"{LIMIT:.2f}")
    console.print(table)
