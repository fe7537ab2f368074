"""CSER on a small classifier: sends a part of every update, and errors every 16 steps.

torchrun --nproc-per-node 2 examples/cser.py --method blocks
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.local import CSER, BlockCSER


def digits(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns noisy copies of ten fixed patterns, and their labels."""
    patterns = torch.randn(10, 784, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (count,), generator=generator)
    return patterns[labels] + 3 * torch.randn(count, 784, generator=generator), labels


def wrap(method: str, model: nn.Module, optimizer: Optimizer) -> CSER | BlockCSER:
    """Returns a method with R = 32: 1/64 + 1/4 every 16 steps, 1/32 a step, or 1/8 every 4."""
    updates, errors = "grbs:ratio=0.015625", "grbs:ratio=0.25"
    if method == "blocks":
        return BlockCSER(model, optimizer, updates, errors, sync_every=16)
    if method == "csea":
        return CSER(model, optimizer, None, "grbs:ratio=0.03125", sync_every=1)
    if method == "cser-pl":
        return CSER(model, optimizer, None, "grbs:ratio=0.125", sync_every=4)
    return CSER(model, optimizer, updates, errors, sync_every=16)


def train(method: str, steps: int, hidden: int) -> tuple[float, dict[str, object]]:
    """Returns the accuracy of the mean of all models, and the traffic statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    # Momentum inside makes it M-CSER.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with wrap(method, model, optimizer) as workers:
        for _ in range(steps):
            inputs, labels = digits(64, generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        with workers.averaged(), torch.no_grad():
            inputs, labels = digits(1000, torch.Generator().manual_seed(2**31))
            accuracy = (model(inputs).argmax(1) == labels).float().mean()
        return float(accuracy), workers.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    methods = ["cser", "blocks", "csea", "cser-pl"]
    parser.add_argument("--method", choices=methods, default="cser")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    accuracy, stats = train(args.method, args.steps, args.hidden)
    if dist.get_rank() == 0:
        ratio, planned = stats["ratio"], stats["planned_ratio"]
        print(f"accuracy {accuracy:.1%}, {ratio:.1f} times fewer bytes (planned: {planned:.1f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
