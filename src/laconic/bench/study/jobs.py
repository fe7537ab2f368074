"""Runs of studies side by side, in a process each: a card has room for more than one."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from laconic.bench.device import hurry
from laconic.bench.forecast.subject import Subject
from laconic.bench.study.quiet import Room
from laconic.bench.study.run import Outcome, Run, Setting


@dataclass(frozen=True)
class _Office:
    """What processes are told; all measure in one room."""

    setting: Setting
    subjects: Mapping[str, Subject]
    end_s: float
    folder: Path

    def take(self, run: Run) -> tuple[Run, Outcome, float]:
        """Lets a process of its own do it, so that no run meets what another has left behind."""
        start_s = time.monotonic()
        context = get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        subject = self.subjects[run.study.workload]
        told = theirs, run, self.setting, subject, self.end_s, self.folder
        process = context.Process(target=_work, args=told)
        process.start()
        theirs.close()
        try:
            outcome: Outcome = ours.recv()
        except EOFError:
            process.join()
            outcome = f"its process ended with {process.exitcode}"
        process.join()
        return run, outcome, time.monotonic() - start_s


def in_processes(
    runs: Sequence[Run],
    setting: Setting,
    subjects: Mapping[str, Subject],
    end_s: float,
    jobs: int,
) -> Iterator[tuple[Run, Outcome, float]]:
    """Every run with its outcome and its seconds, as they end; `jobs` of them at a time."""
    lent = {spec: subject.to("cpu") for spec, subject in subjects.items()}
    with TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        office = _Office(setting, lent, end_s, Path(folder))
        for done in as_completed([pool.submit(office.take, run) for run in runs]):
            yield done.result()


def _work(
    told: Connection, run: Run, setting: Setting, subject: Subject, end_s: float, folder: Path
) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    if setting.device == "cuda":
        hurry()
    room = Room(folder, setting.device)
    told.send(run.outcome(setting, subject.to(setting.device), end_s, room))
