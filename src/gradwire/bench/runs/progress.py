"""Progress of a run: one line per case in the terminal, and scalars for TensorBoard.

Without a terminal a line is printed when a case ends. TensorBoard gets one folder per run.
"""

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from gradwire.bench import human
from gradwire.bench.records.compare import median_of
from gradwire.bench.time_left import TimeLeft
from gradwire.bench.worker.protocol import Evaluated, Failed, Finished, Message, Started, Tick
from gradwire.errors import MissingExtra

_FACTS = ("state", "loss", "pace", "sent")


class ProgressDisplay:
    """Shows messages in the terminal, which it occupies as a context manager."""

    def __init__(self, console: Console, cases: Sequence[str], steps: int, rounds: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            *(
                TextColumn(f"{{task.fields[{fact}]}}", table_column=Column(justify="right"))
                for fact in _FACTS
            ),
            console=console,
        )
        self._steps, self._rounds = steps, rounds
        self._taken, self._blocks = dict.fromkeys(cases, 0), dict.fromkeys(cases, 0)
        self._tasks = {case: self._add(case) for case in cases}
        self._total, self._time_left = steps * rounds * len(cases), TimeLeft()

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def show(self, message: Message) -> None:
        match message:
            case Started(case=case):
                self._update(case, state="warming up")
            case Tick(case=case, step=step, step_ms=step_ms):
                self._steps_taken(case, step)
                self._update(case, pace=f"{human.duration_ms(step_ms)}/step")
            case Evaluated(case=case, loss=loss, sent_bytes=sent_bytes):
                sent = f"sent {human.byte_size(sent_bytes)}"
                self._update(case, loss=f"loss {human.digits(loss)}", sent=sent)
            case Finished(case=case):
                self._finished(message)
            case Failed(case=case, error=error):
                self._update(case, state="failed")
                self._print_line(f"{case}: failed: {error}")

    def _finished(self, message: Finished) -> None:
        case = message.case
        # A slow case may take fewer steps in a block, and more in a later one.
        self._taken[case] += len(message.steps_ms)
        self._blocks[case] += 1
        self._steps_taken(case, 0)
        pace = f"{human.duration_ms(median_of(message.steps_ms))}/step"
        self._update(case, pace=pace)
        if self._blocks[case] == self._rounds:
            self._print_line(f"{case}: done, {pace}{self._left()}")

    def _steps_taken(self, case: str, step: int) -> None:
        done = self._taken[case] + step
        total = self._steps * self._rounds
        self._progress.update(self._tasks[case], completed=done)
        # The time left of all cases; blocks of several alternate, so that one's own says little.
        self._update(case, state=f"step {done}/{total}{self._left()}")

    def _left(self) -> str:
        done = sum(task.completed for task in self._progress.tasks)
        return self._time_left.words(done, self._total)

    def _add(self, case: str) -> TaskID:
        total = self._steps * self._rounds
        return self._progress.add_task(case, total=total, state="", loss="", pace="", sent="")

    def _update(self, case: str, **facts: str) -> None:
        for name, text in facts.items():
            self._progress.tasks[self._tasks[case]].fields[name] = text

    def _print_line(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Writer(Protocol):
    """The methods of torch's SummaryWriter that are used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def add_text(self, tag: str, text_string: str) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def summary_writer(folder: Path) -> Writer:
    """Opens torch's SummaryWriter, which needs the package tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Writer = SummaryWriter(str(folder))
    return writer


def check_installed() -> None:
    if find_spec("tensorboard") is None:
        raise MissingExtra("--tensorboard", "tensorboard", "tensorboard")


class TensorBoardWriter:
    """Writes the workers' messages below `folder`, to one folder per case with this seed."""

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
            case Evaluated():
                self._write_evaluation(message)
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

    def _write_evaluation(self, evaluation: Evaluated) -> None:
        first = evaluation.step - len(evaluation.losses) + 1
        for step, loss in enumerate(evaluation.losses, start=first):
            self._scalar("train/loss", loss, step)
        self._scalar("held-out/loss", evaluation.loss, evaluation.step)
        self._scalar(f"held-out/{evaluation.metric_name}", evaluation.metric, evaluation.step)
        self._scalar("time_s", evaluation.time_s, evaluation.step)
        self._scalar("sent_bytes", evaluation.sent_bytes, evaluation.step)
        if self._writer is not None:
            self._writer.flush()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if self._writer is not None:
            self._writer.add_scalar(name, value, step)
