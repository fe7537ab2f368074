"""The overhead inside other trainers: `none` through each against the same trainer alone.

`gradwire bench integrations --trainers` starts it with torchrun; it prints a line of JSON per
trainer. A trainer cannot be paused between two steps, so short runs of both alternate.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.bench.microbench.integrations import WIDTH, Overhead, overhead

BATCH = 32
WARM_UP = 3
"""Steps that create buckets and lanes."""


class Timed(nn.Module):
    """A model that returns its loss and records the time of every forward pass."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.starts: list[float] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.starts.append(perf_counter())
        return {"loss": self.layers(x).square().mean()}

    def seconds(self) -> list[float]:
        """Returns the time of each step, without the warm-up."""
        steps = zip(self.starts[WARM_UP:-1], self.starts[WARM_UP + 1 :], strict=True)
        return [after - before for before, after in steps]


Run: TypeAlias = Callable[[Timed, Tensor, bool], None]
"""Trains a model on batches, with Gradwire or without."""


def accelerate(model: Timed, inputs: Tensor, attached: bool) -> None:
    from accelerate import Accelerator

    from gradwire.integrations.accelerate import keep_state
    from gradwire.integrations.ddp import attach

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(inputs), batch_size=BATCH)
    ddp, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    link = attach(ddp, "none") if attached else None
    if link is not None:
        keep_state(accelerator, link)
    for [x] in loader:
        optimizer.zero_grad()
        accelerator.backward(ddp(x)["loss"])
        optimizer.step()
    if link is not None:
        link.detach()


def lightning(model: Timed, inputs: Tensor, attached: bool) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from gradwire.integrations.lightning import GradwireCallback

    class Fitted(LightningModule):
        def __init__(self) -> None:
            LightningModule.__init__(self)
            self.model = model

        def training_step(self, batch: list[Tensor]) -> Any:
            return self.model(batch[0])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    disabled = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        callbacks=[GradwireCallback("none")] if attached else [],
        **dict.fromkeys(disabled, False),
    )
    trainer.fit(Fitted(), DataLoader(TensorDataset(inputs), batch_size=BATCH))


def transformers(model: Timed, inputs: Tensor, attached: bool) -> None:
    from transformers import Trainer, TrainingArguments

    from gradwire.integrations.transformers import GradwireCallback

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            optim="sgd",
            use_cpu=True,
            ddp_backend="gloo",
            ddp_find_unused_parameters=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model, settings, train_dataset=[{"x": x} for x in inputs])
        if attached:
            trainer.add_callback(GradwireCallback(trainer, "none"))
        trainer.train()


RUNS: tuple[Run, ...] = (accelerate, lightning, transformers)


def compare(width: int, steps: int, rounds: int) -> list[Overhead]:
    """Returns a row per trainer, over rounds of one run each; call it on all ranks of torchrun."""
    rows: list[Overhead] = []
    inputs = torch.randn((WARM_UP + steps) * BATCH * dist.get_world_size(), width)
    for run in RUNS:
        medians_s: list[list[float]] = [[], []]
        for number in range(2 * rounds):
            # Each is first equally often: 0 1, 1 0, 0 1, ...
            attached = number % 4 in (1, 2)
            model = Timed(width)
            run(model, inputs, attached)
            medians_s[attached].append(median(model.seconds()))
        rows.append(overhead(run.__name__, *medians_s))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for row in compare(args.width, args.steps, args.rounds):
        if dist.get_rank() == 0:
            print(json.dumps(row._asdict()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
