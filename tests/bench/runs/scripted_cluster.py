"""A cluster without processes: every launch prints the lines of the next script."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gradwire.bench.records.files import to_row
from gradwire.bench.worker.protocol import TAG, Evaluated, Finished, Job, Message, read_job

Script = Callable[[Job], Iterator[Message]]


@dataclass
class ScriptedCluster:
    scripts: list[Script]
    workers: int = 2
    shaped: bool = False
    note: str | None = "scripted"
    interface: str | None = None
    jobs: list[Job] = field(default_factory=list)
    error_lines: list[str] = field(default_factory=lambda: ["and warn"])

    def launch(
        self,
        command: Sequence[str],
        *,
        on_line: Callable[[int, str], None],
        on_error_line: Callable[[int, str], None],
        extra_env: Mapping[str, str] = {},
    ) -> int:
        job = read_job(Path(command[-1]))
        self.jobs.append(job)
        on_line(0, "workers also print other things")
        for line in self.error_lines:
            on_error_line(0, line)
        for message in self.scripts.pop(0)(job):
            on_line(0, TAG + json.dumps(to_row(message)))
        return 1 if self.scripts else 0

    @contextmanager
    def open(self, workers: int, rate: str | None) -> Iterator["ScriptedCluster"]:
        yield self


def evaluated(case: str, step: int, loss: float) -> Evaluated:
    return Evaluated(
        case=case,
        step=step,
        time_s=2.0 * step,
        sent_bytes=10.0 * step,
        loss=loss,
        metric_name="accuracy",
        metric=0.5,
    )


def finished(case: str, steps_ms: tuple[float, ...] = (1.0, 2.0, 9.0)) -> Finished:
    return Finished(
        case=case,
        parameters=7,
        steps_ms=steps_ms,
        sent_bytes=5.0,
        dense_bytes=20.0,
        encode_ms=None,
        wire_ms=None,
        decode_ms=None,
    )
