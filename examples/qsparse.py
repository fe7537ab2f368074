"""Qsparse-local-SGD on a small classifier: eight local steps, then 1 % of the drift in 4 bits.

torchrun --nproc-per-node 2 examples/qsparse.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic


def digits(count: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy copies of ten fixed patterns, and which of them each is."""
    patterns = torch.randn(10, 784, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (count,), generator=dice)
    return patterns[labels] + 3 * torch.randn(count, 784, generator=dice), labels


def train(steps: int, hidden: int) -> tuple[float, dict[str, object]]:
    """The accuracy of the mean of all models, and what was said for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    dice = torch.Generator().manual_seed(dist.get_rank())
    spec = "topk:ratio=0.01 | qsgd:bits=4"
    with laconic.local.QsparseLocalSGD(model, optimizer, spec, sync_every=8) as workers:
        for _ in range(steps):
            inputs, labels = digits(64, dice)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        with workers.averaged(), torch.no_grad():
            inputs, labels = digits(1000, torch.Generator().manual_seed(2**31))
            right = (model(inputs).argmax(1) == labels).float().mean()
        return float(right), workers.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hidden", type=int, default=512)
    said = parser.parse_args()
    dist.init_process_group("gloo")
    accuracy, stats = train(said.steps, said.hidden)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.1%}, {stats['ratio']:.0f} times fewer bytes than dense steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
