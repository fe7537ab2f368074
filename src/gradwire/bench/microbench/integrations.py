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
    attached: Step


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
    dense, sharded = _model(width), _model(width)
    fully_shard(dense)
    fully_shard(sharded)
    shards = attach_fsdp(sharded, "none")
    yield "fsdp", Pair(_step(dense, x), _step(sharded, x))
    shards.detach()


def compare(width: int, steps: int) -> list[dict[str, object]]:
    """Returns a row per integration: both medians and their ratio; call it on all ranks."""
    rows: list[dict[str, object]] = []
    for name, pair in pairs(width):
        seconds: list[list[float]] = [[], []]
        for number in range(steps + 2):
            for attached in (0, 1) if number % 2 else (1, 0):
                dist.barrier()
                start = perf_counter()
                pair[attached]()
                seconds[attached].append(perf_counter() - start)
        # The first two steps create buckets and lanes.
        plain_ms, none_ms = (1e3 * median(times[2:]) for times in seconds)
        ratio = none_ms / plain_ms
        rows.append({"mount": name, "plain_ms": plain_ms, "none_ms": none_ms, "ratio": ratio})
    return rows


def _rank(rank: int, ranks: int, steps: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for row in compare(WIDTH, steps):
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        spawn(_rank, (args.ranks, args.steps, store), args.ranks)


if __name__ == "__main__":
    main()
