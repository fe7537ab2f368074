"""The race as it runs: one line a case, in a terminal; elsewhere one line when a case is over."""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from laconic.bench import human
from laconic.bench.hosts.messages import Failed, Finished, Look, Message, Started, Tick
from laconic.bench.records.speed import middle

_FACTS = ("state", "loss", "pace", "sent")


class Live:
    """Shows messages; a context manager, since it holds the terminal."""

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
        self._taken = dict.fromkeys(cases, 0)
        self._tasks = {case: self._add(case) for case in cases}

    def __enter__(self) -> "Live":
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
            case Look(case=case, loss=loss, sent_bytes=sent_bytes):
                sent = f"sent {human.byte_size(sent_bytes)}"
                self._update(case, loss=f"loss {human.digits(loss)}", sent=sent)
            case Finished(case=case):
                self._finished(message)
            case Failed(case=case, error=error):
                self._update(case, state="failed")
                self._say(f"{case}: failed: {error}")

    def _finished(self, message: Finished) -> None:
        case = message.case
        self._taken[case] += self._steps
        self._steps_taken(case, 0)
        pace = f"{human.duration_ms(middle(message.steps_ms))}/step"
        self._update(case, pace=pace)
        if self._taken[case] == self._steps * self._rounds:
            self._say(f"{case}: done, {pace}")

    def _steps_taken(self, case: str, step: int) -> None:
        done = self._taken[case] + step
        total = self._steps * self._rounds
        self._progress.update(self._tasks[case], completed=done)
        self._update(case, state=f"step {done}/{total}")

    def _add(self, case: str) -> TaskID:
        total = self._steps * self._rounds
        return self._progress.add_task(case, total=total, state="", loss="", pace="", sent="")

    def _update(self, case: str, **facts: str) -> None:
        for name, text in facts.items():
            self._progress.tasks[self._tasks[case]].fields[name] = text

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
