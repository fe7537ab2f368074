"""A loop with Accelerate, saved half-way and resumed: every rank restores its own residuals.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire
from gradwire.integrations.accelerate import keep_state


def digits(count: int, seed: int) -> TensorDataset:
    """Returns noisy copies of ten fixed patterns, and the labels."""
    patterns = torch.randn(10, 784, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(
        patterns[labels] + 3 * torch.randn(count, 784, generator=generator), labels
    )


def train(method: str, epochs: int, hidden: int, folder: str) -> tuple[float, dict[str, object]]:
    """Returns the accuracy on unseen images, and statistics since the state in `folder`."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(digits(2048, 1), batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    link = gradwire.attach(model, method)
    keep_state(accelerator, link)
    if any(Path(folder).iterdir()):
        accelerator.load_state(folder)
    for _ in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
    # No rank saves before all have checked for a state to load.
    accelerator.wait_for_everyone()
    accelerator.save_state(folder)
    with torch.no_grad():
        inputs, labels = digits(1000, 2).tensors
        right = (model.module(inputs).argmax(1) == labels).float().mean()
    stats = link.stats()
    link.detach()
    return float(right), stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="powersgd:rank=4")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory() as own:
        [folder] = broadcast_object_list([own])
        for _ in range(2):
            accuracy, stats = train(args.method, args.epochs // 2, args.hidden, folder)
            accelerator.print(f"accuracy {accuracy:.1%}, {stats['ratio']:.0f} times fewer bytes")
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
