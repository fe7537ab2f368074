"""Decentralised training of a small classifier, whose workers see different classes.

torchrun --nproc-per-node 4 examples/decentralized.py --method cgt --topology ring
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire import decentralized


def digits(count: int, classes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns noisy copies of fixed patterns, one of ten for each class, and their labels."""
    patterns = torch.randn(10, 784, generator=torch.Generator().manual_seed(0))
    labels = classes[torch.randint(len(classes), (count,), generator=generator)]
    return patterns[labels] + 3 * torch.randn(count, 784, generator=generator), labels


def train(
    method: str, topology: str, steps: int, hidden: int
) -> tuple[float, float, dict[str, object]]:
    """Returns the accuracy of the mean of all models, that of this worker's, and statistics."""
    torch.manual_seed(0)
    rank, workers = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    if method == "dsgd":
        context = decentralized.DSGD(model, optimizer, topology=topology)
    elif method == "choco":
        context = decentralized.ChocoSGD(
            model, optimizer, "topk:ratio=0.05", gamma=0.2, topology=topology
        )
    else:
        wrap = decentralized.CGT if method == "cgt" else decentralized.BEER
        context = wrap(model, optimizer, "topk:ratio=0.05", gamma=0.1, topology=topology)
    generator = torch.Generator().manual_seed(rank)
    # Worker i sees the classes i, i + N, i + 2 N ..., so no worker could learn the task alone.
    own_classes, all_classes = torch.arange(rank, 10, workers), torch.arange(10)
    with context as worker:
        for _ in range(steps):
            inputs, labels = digits(64, own_classes, generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        inputs, labels = digits(1000, all_classes, torch.Generator().manual_seed(2**31))
        with torch.no_grad():
            own = (model(inputs).argmax(1) == labels).float().mean()
            with worker.consensus():
                common = (model(inputs).argmax(1) == labels).float().mean()
        return float(common), float(own), worker.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=["dsgd", "choco", "cgt", "beer"], default="choco")
    parser.add_argument("--topology", default="ring", help="such as ring, torus or exponential")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    common, own, stats = train(args.method, args.topology, args.steps, args.hidden)
    print(f"worker {dist.get_rank()}: accuracy {own:.1%}")
    if dist.get_rank() == 0:
        gap, distance = stats["spectral_gap"], stats["consensus_distance"]
        print(f"{args.topology}: spectral gap {gap:.3g}, distance from the mean {distance:.3g}")
        print(f"accuracy of the mean {common:.1%}, {stats['ratio']:.1f} times fewer bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
