"""Runs as they go, for TensorBoard: one folder a run, the same names in all of them."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from laconic.bench.hosts.messages import Failed, Finished, Look, Message, Started, Tick
from laconic.errors import MissingExtra


class Writer(Protocol):
    """What is used of torch's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def add_text(self, tag: str, text_string: str) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def summary_writer(folder: Path) -> Writer:
    """torch's own; it needs the package that reads what it writes."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Writer = SummaryWriter(str(folder))
    return writer


def check_installed() -> None:
    if find_spec("tensorboard") is None:
        raise MissingExtra("--tensorboard", "tensorboard", "tensorboard")


class Board:
    """Writes what workers say under `folder`, into a folder for each case and this seed."""

    def __init__(
        self, folder: Path, seed: int, open_writer: Callable[[Path], Writer] = summary_writer
    ) -> None:
        self._folder, self._seed, self._open = folder, seed, open_writer
        self._writer: Writer | None = None

    def show(self, message: Message) -> None:
        match message:
            case Started(case=case):
                self.close()
                name = re.sub(r"[^\w.,=@-]+", "_", f"{case}, seed {self._seed}")
                self._writer = self._open(self._folder / name)
            case Tick(step=step, step_ms=step_ms):
                self._scalar("step_ms", step_ms, step)
            case Look():
                self._look(message)
            case Failed(error=error):
                if self._writer is not None:
                    self._writer.add_text("failed", error)
                self.close()
            case Finished():
                self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _look(self, look: Look) -> None:
        first = look.step - len(look.losses) + 1
        for step, loss in enumerate(look.losses, start=first):
            self._scalar("train/loss", loss, step)
        self._scalar("held-out/loss", look.loss, look.step)
        self._scalar(f"held-out/{look.metric_name}", look.metric, look.step)
        self._scalar("time_s", look.time_s, look.step)
        self._scalar("sent_bytes", look.sent_bytes, look.step)
        if self._writer is not None:
            self._writer.flush()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if self._writer is not None:
            self._writer.add_scalar(name, value, step)
