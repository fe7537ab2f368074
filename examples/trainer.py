"""Hugging Face's Trainer, with a callback that compresses gradients.

torchrun --nproc-per-node 2 examples/trainer.py
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from gradwire.integrations.transformers import GradwireCallback


class Classifier(nn.Module):
    def __init__(self, hidden: int) -> None:
        nn.Module.__init__(self)
        self.layers = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def digits(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Returns noisy copies of ten fixed patterns, and the labels."""
    patterns = torch.randn(10, 784, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    inputs = patterns[labels] + 3 * torch.randn(count, 784, generator=generator)
    return [{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]


def train(method: str, steps: int, hidden: int, folder: str) -> tuple[float, dict[str, object]]:
    """Returns the accuracy on unseen images, and statistics of the communication."""
    torch.manual_seed(0)
    model = Classifier(hidden)
    settings = TrainingArguments(
        folder,
        max_steps=steps,
        save_steps=steps // 2,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, settings, train_dataset=digits(2048, 1))
    compression = GradwireCallback(trainer, method)
    trainer.add_callback(compression)
    trainer.train()
    with torch.no_grad():
        unseen = digits(1000, 2)
        logits = model.layers(torch.stack([one["inputs"] for one in unseen]))
        right = (logits.argmax(1) == torch.stack([one["labels"] for one in unseen])).float().mean()
    assert compression.link is not None
    return float(right), compression.link.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="int4")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--folder", help="Folder of checkpoints; without it they are discarded.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as thrown_away:
        folder = args.folder or thrown_away
        accuracy, stats = train(args.method, args.steps, args.hidden, folder)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.1%}, {stats['ratio']:.0f} times fewer bytes than dense steps")


if __name__ == "__main__":
    main()
