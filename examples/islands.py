"""DiLoCo or SparseLoCo between two islands, in each of which FSDP2 shards the model.

torchrun --nproc-per-node 4 examples/islands.py
gradwire net --workers 4 --links sites.json -- python examples/islands.py --method sparseloco
"""

import argparse
import inspect
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire

CONTEXT = 16


class Block(nn.Module):
    """Two matrices around a nonlinearity, added to their input."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(self.norm(x))
        return out


class ByteModel(nn.Module):
    """Predicts the next byte of a text from the 16 before it."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(256, width // CONTEXT)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.output = nn.Linear(width, 256)

    def forward(self, window: Tensor) -> Tensor:
        x = self.embedding(window).flatten(1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(x)
        return logits


def windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns random windows of 16 bytes, and the byte that follows each."""
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    window = text[starts + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, -1]


def train(
    method: str, steps: int, width: int, sync_every: int, islands: int = 2
) -> tuple[float, float, dict[str, object]]:
    """Returns the loss of the mean of all islands, seconds a step, and the statistics."""
    shape = (islands, dist.get_world_size() // islands)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("islands", "inside"))
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    torch.manual_seed(0)
    model = ByteModel(width)
    # FSDP2 has the mesh of one island alone: it does not see the slow links.
    for block in model.blocks:
        fully_shard(block, mesh=mesh["inside"])
    fully_shard(model, mesh=mesh["inside"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    wrap = {"diloco": gradwire.local.DiLoCo, "sparseloco": gradwire.local.SparseLoCo}[method]
    start_s = perf_counter()
    with wrap(model, optimizer, sync_every=sync_every, process_group=mesh["islands"]) as workers:
        for _ in range(steps):
            inputs, targets = windows(text[:-10000], 64, generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        step_s = (perf_counter() - start_s) / steps
        with workers.averaged(), torch.no_grad():
            inputs, targets = windows(text[-10000:], 1000, torch.Generator().manual_seed(2**31))
            loss = nn.functional.cross_entropy(model(inputs), targets)
        return float(loss), step_s, workers.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=["diloco", "sparseloco"], default="diloco")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sync-every", type=int, default=30)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    loss, step_s, stats = train(args.method, args.steps, args.width, args.sync_every)
    if dist.get_rank() == 0:
        sent = f"{stats['sent_bytes']:,} bytes from rank 0 to the other island"
        print(f"loss {loss:.3f}, {1000 * step_s:.1f} ms a step, {sent}")
        print(f"{stats['ratio']:.0f} times fewer than a mean of its shard at every step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
