"""A classifier that Lightning fits, with a callback that compresses its gradients.

python examples/lightning_fit.py --devices 2
"""

import argparse

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.integrations.lightning import GradwireCallback


class Classifier(LightningModule):
    def __init__(self, hidden: int) -> None:
        LightningModule.__init__(self)
        self.layers = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def digits(count: int, seed: int) -> TensorDataset:
    """Returns noisy copies of ten fixed patterns, and the labels."""
    patterns = torch.randn(10, 784, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(
        patterns[labels] + 3 * torch.randn(count, 784, generator=generator), labels
    )


def train(method: str, epochs: int, hidden: int, devices: int) -> tuple[float, dict[str, object]]:
    """Returns the accuracy on unseen images, and statistics of the communication."""
    torch.manual_seed(0)
    model = Classifier(hidden)
    compression = GradwireCallback(method)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=devices,
        strategy="ddp",
        callbacks=[compression],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(digits(2048, 1), batch_size=64))
    with torch.no_grad():
        inputs, labels = digits(1000, 2).tensors
        right = (model.layers(inputs).argmax(1) == labels).float().mean()
    assert compression.link is not None
    return float(right), compression.link.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="powersgd:rank=4")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    accuracy, stats = train(args.method, args.epochs, args.hidden, args.devices)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.1%}, {stats['ratio']:.0f} times fewer bytes than dense steps")


if __name__ == "__main__":
    main()
