"""A classifier under DistributedDataParallel, whose workers exchange compressed AdamW updates.

torchrun --nproc-per-node 2 examples/optim.py --method topk:ratio=0.05
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire


def digits(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns noisy copies of ten fixed patterns, and the labels."""
    patterns = torch.randn(10, 784, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (count,), generator=generator)
    return patterns[labels] + 3 * torch.randn(count, 784, generator=generator), labels


def train(method: str, steps: int, hidden: int) -> tuple[float, dict[str, object]]:
    """Returns the accuracy on unseen images, and statistics of the communication."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10)))
    optimizer = gradwire.optim.AdamW(model, lr=1e-3, compress=method)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        inputs, labels = digits(64, generator)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    with torch.no_grad():
        inputs, labels = digits(1000, torch.Generator().manual_seed(2**31))
        right = (model.module(inputs).argmax(1) == labels).float().mean()
    stats = optimizer.link.stats()
    optimizer.link.detach()
    return float(right), stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="topk:ratio=0.01")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    accuracy, stats = train(args.method, args.steps, args.hidden)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.1%}, {stats['ratio']:.0f} times fewer bytes than dense steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
