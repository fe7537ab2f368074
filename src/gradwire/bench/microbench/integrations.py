"""The overhead of each integration: `none` through it against the same loop without Gradwire.

`python -m gradwire.bench.microbench.integrations --ranks 2` prints a line of JSON per integration,
whose ratio should be below 1.05. Steps of both alternate, so that a slowdown of the machine affects
both. Each is first equally often, since the second finds warm caches.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.integrations.ddp import attach
from gradwire.integrations.fsdp import attach_fsdp
from gradwire.integrations.reducer import Reducer

Step: TypeAlias = Callable[[], None]

WIDTH = 1024


class Pair(NamedTuple):
    """A training step without Gradwire, and with."""

    plain: Step
    mounted: Step


def _model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def _step(model: nn.Module, x: Tensor, between: Step = lambda: None) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        between()
        optimizer.step()

    return step


def _flat_mean(model: nn.Module) -> Step:
    """What a loop without DDP does by hand: one all-reduce of all gradients."""

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
    """The steps to race, by mount."""
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(32, width)
    plain, mounted = DDP(_model(width)), DDP(_model(width))
    link = attach(mounted, "none")
    yield "ddp", Pair(_step(plain, x), _step(mounted, x))
    link.detach()
    by_hand, ours = _model(width), _model(width)
    reducer = Reducer(ours, "none")
    yield "loop", Pair(_step(by_hand, x, _flat_mean(by_hand)), _step(ours, x, reducer.reduce))
    reducer.detach()
    dense, sharded = _model(width), _model(width)
    fully_shard(dense)
    fully_shard(sharded)
    shards = attach_fsdp(sharded, "none")
    yield "fsdp", Pair(_step(dense, x), _step(sharded, x))
    shards.detach()


def race(width: int, steps: int) -> list[dict[str, object]]:
    """A row a mount: the medians of both, and their ratio; called on all ranks."""
    rows: list[dict[str, object]] = []
    for name, pair in pairs(width):
        seconds: list[list[float]] = [[], []]
        for ctx in range(steps + 2):
            for mounted in (0, 1) if ctx % 2 else (1, 0):
                dist.barrier()
                start = perf_counter()
                pair[mounted]()
                seconds[mounted].append(perf_counter() - start)
        # The first two make buckets and lanes.
        plain_ms, mounted_ms = (1e3 * median(times[2:]) for times in seconds)
        ratio = mounted_ms / plain_ms
        rows.append({"mount": name, "plain_ms": plain_ms, "none_ms": mounted_ms, "ratio": ratio})
    return rows


def _rank(rank: int, ranks: int, steps: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for row in race(WIDTH, steps):
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        spawn(_rank, (asked.ranks, asked.steps, store), asked.ranks)


if __name__ == "__main__":
    main()
