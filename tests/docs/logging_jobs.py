"""Runs the code of docs/how-to/logging.md with the real loggers, offline, in one process."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "logging.md"
STEPS = 3


def block(title: str) -> str:
    """Returns the code block of the page with this title."""
    found = re.search(rf'```python title="{title}"\n(.*?)```', PAGE.read_text(), re.S)
    assert found is not None, title
    return found[1]


class Names(dict[str, Any]):
    """The names that the examples use: a model in DDP and a step of its training."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.plain = nn.Linear(64, 32)
        optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        dict.__init__(self, folder=str(folder), steps=STEPS, model=self.plain, optimizer=optimizer)
        self |= {"torch": torch, "logging": logging, "gradwire": gradwire}
        self["train_step"] = self.train_step

    def train_step(self, step: int) -> None:
        self["optimizer"].zero_grad()
        self["model"](torch.ones(4, 64)).square().mean().backward()
        self["optimizer"].step()

    def attach(self) -> None:
        self["model"] = DDP(self.plain)
        self["link"] = gradwire.attach(self["model"], "int4")


def plain_loop(names: Names, title: str) -> None:
    names.attach()
    if title == "mlflow":
        import mlflow

        mlflow.set_tracking_uri(f"file://{names['folder']}/runs")


def with_lightning(names: Names) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger
    from torch.utils.data import DataLoader

    from gradwire.integrations.lightning import GradwireCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            LightningModule.__init__(self)
            self.layer = names.plain

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return names["optimizer"]

    names |= {"GradwireCallback": GradwireCallback, "Trainer": Trainer, "module": Module()}
    names["batches"] = DataLoader([torch.ones(64)] * STEPS)
    names["logger"] = TensorBoardLogger(names["folder"], name="", version="")
    names["settings"] = {
        "accelerator": "cpu",
        "devices": 1,
        "strategy": "ddp",
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }


def with_transformers(names: Names) -> None:
    from transformers import Trainer, TrainingArguments

    from gradwire.integrations.transformers import GradwireCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.layer = names.plain

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    os.environ["TENSORBOARD_LOGGING_DIR"] = names["folder"]
    args = TrainingArguments(
        names["folder"],
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=STEPS,
        logging_steps=1,
        report_to=["tensorboard"],
        save_strategy="no",
        disable_tqdm=True,
    )
    names["trainer"] = Trainer(Model(), args, train_dataset=[{"x": torch.ones(64)}] * 64)
    names["GradwireCallback"] = GradwireCallback


def with_accelerate(names: Names) -> None:
    from accelerate import Accelerator

    names["Accelerator"] = Accelerator


def tensorboard_values(folder: str) -> dict[str, list[float]]:
    """Reads all scalars of TensorBoard's files in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[float]] = {}
    for path in Path(folder).rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path)).Reload()
        for name in events.Tags()["scalars"]:
            key = name.removeprefix("train/")
            found[key] = [event.value for event in events.Scalars(name)]
    return found


def log_records(data: bytes) -> Iterator[bytes]:
    """Yields the records of W&B's file: short ones, so that none is cut at the end of a block."""
    at = 7  # the file's own header
    while at + 7 <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind == 0:
            return
        yield data[at + 7 : at + 7 + length]
        at += 7 + length


def logged(title: str, folder: str) -> list[float]:
    """Returns the bytes of all steps as the logger of this example has stored them."""
    if title == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(f"file://{folder}/runs")
        [run] = client.search_runs(["0"])
        return [m.value for m in client.get_metric_history(run.info.run_id, "gradwire/sent_bytes")]
    if title == "wandb":
        from wandb.proto import wandb_internal_pb2

        [path] = Path(folder).rglob("*.wandb")
        found = []
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for item in record.history.item:
                if "gradwire/sent_bytes" in (item.key, *item.nested_key):
                    found.append(float(item.value_json))
        return found
    return tensorboard_values(folder)["gradwire/sent_bytes"]


def main(title: str, folder: str, port: str) -> None:
    # Others' warnings are not what is tested here.
    warnings.simplefilter("ignore")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, ACCELERATE_USE_CPU="true")
    names = Names(Path(folder))
    if title != "lightning":
        dist.init_process_group("gloo")
    trainers = {
        "lightning": with_lightning,
        "accelerate": with_accelerate,
        "transformers": with_transformers,
    }
    if title in trainers:
        trainers[title](names)
    else:
        plain_loop(names, title)
    exec(block(title), names)
    if title == "wandb":
        # Its service process may still be writing.
        names["wandb"].teardown()
    if title not in ("trace", "lines"):
        print("sent_bytes", len(logged(title, folder)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
