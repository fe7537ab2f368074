"""Training that goes on when replicas are lost, and takes them back: torchft with compression.

torchft_lighthouse --min_replicas 1 --join_timeout_ms 2000
python examples/elastic.py --replica 0 --lighthouse http://localhost:29510
python examples/elastic.py --replica 1 --lighthouse http://localhost:29510 --method sparseloco
"""

import argparse
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torchft import Manager, Optimizer, ProcessGroupGloo

import gradwire.elastic


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns noisy copies of ten fixed patterns, and their labels."""
    patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return patterns[labels] + 2 * torch.randn(count, 64, generator=generator), labels


def make_manager(replica: int, lighthouse: str, store: dist.TCPStore, **options: Any) -> Manager:
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        **options,
    )


def train_gradients(
    model: nn.Module, replica: int, steps: int, connect: Callable[..., Manager]
) -> dict[str, object]:
    """Trains with top-k gradients in every step; torchft's script, with one line more."""
    inner = AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = connect(
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    )
    link = gradwire.elastic.attach(manager, model, "topk:ratio=0.02")
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < steps:
        inputs, labels = digits(32, seed=1000 * manager.current_step() + replica)
        optimizer.zero_grad()  # asks for the quorum
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()  # exchanges the gradients, and steps if the quorum commits
    return link.stats()


def train_sparseloco(
    model: nn.Module, replica: int, steps: int, connect: Callable[..., Manager]
) -> dict[str, object]:
    """Trains with local steps, and a sync of all replicas that are present after every tenth."""
    optimizer = AdamW(model.parameters(), lr=1e-3)
    manager = connect(
        load_state_dict=None,
        state_dict=None,
        use_async_quorum=False,
        quorum_timeout=timedelta(minutes=10),
    )
    with gradwire.elastic.SparseLoCo(manager, model, optimizer, sync_every=10) as replicas:
        for step in range(steps):
            inputs, labels = digits(32, seed=1000 * step + replica)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return replicas.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--lighthouse", default="http://localhost:29510")
    parser.add_argument("--method", choices=["gradients", "sparseloco"], default="gradients")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    model = nn.Sequential(nn.Linear(64, args.width), nn.ReLU(), nn.Linear(args.width, 10))
    # The Manager connects to it as long as it lives.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def connect(**options: Any) -> Manager:
        return make_manager(args.replica, args.lighthouse, store, **options)

    train = train_gradients if args.method == "gradients" else train_sparseloco
    stats = train(model, args.replica, args.steps, connect)
    with torch.no_grad():
        inputs, labels = digits(2000, seed=2**31)
        accuracy = float((model(inputs).argmax(1) == labels).float().mean())
    print(f"accuracy {accuracy:.3f}, {stats['commits']} commits, {stats['rollbacks']} rolled back")


if __name__ == "__main__":
    main()
