"""`gradwire bench faults`: injects faults into running jobs, restarts them, and checks the results.

A job trains on four emulated hosts and saves checkpoints. Each fault ends it or a part of it; the
next attempt resumes from the files. At the end its losses and weights are compared with those of a
job without faults. Asynchronous workers are not deterministic: they are only checked for hangs,
errors and checkpoints.
"""

import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from rich.console import Console

from gradwire.bench.faults.injection import Fault, FaultKind, Phase
from gradwire.bench.faults.jobs import Job, JobKind
from gradwire.bench.faults.runner import Attempt, Event, HostRunner, React
from gradwire.bench.machine import machine_facts
from gradwire.bench.records.files import append, check_writable
from gradwire.bench.records.schema import CampaignRecord, FaultRecord
from gradwire.bench.time_left import TimeLeft
from gradwire.checkpoint.files import Checkpoints
from gradwire.checks import check_whole
from gradwire.errors import ConfigError
from gradwire.testbed.hosts import Testbed

WORKERS = 4
RATE = "100mbit"
TIMEOUT_S = 3.0
STEPS_PER_FAULT = 3
MAX_STEPS_TO_FAULT = 6
"""A fault happens within so many steps of a restart."""

_PHASES: tuple[Phase, ...] = ("compute", "encode", "wire", "decode", "save")
_FROM_OUTSIDE: tuple[FaultKind, ...] = ("stop", "cut", "raise", "nan", "full-disk")
_FILES: tuple[FaultKind, ...] = ("missing-files", "damaged-file")
KINDS: Mapping[JobKind, tuple[FaultKind, ...]] = {
    "ddp": ("kill", *_FROM_OUTSIDE, "corrupt", *_FILES),
    "fsdp": ("kill", *_FROM_OUTSIDE, "corrupt", *_FILES),
    "local": ("kill", *_FROM_OUTSIDE, *_FILES),
    "async": ("kill", *_FROM_OUTSIDE, "damaged-file"),
}
"""Faults of each job: local methods have no checksums, asynchronous workers need no common step."""

SPECS: Mapping[JobKind, str] = {
    "ddp": "topk:ratio=0.1",
    "fsdp": "int4",
    "local": "topk:ratio=0.1 | qsgd:bits=4",
    "async": "topk:ratio=0.1 | qsgd:bits=4",
}
JOBS = tuple(SPECS)

_OWN_ERRORS: Mapping[FaultKind, str] = {
    "raise": "ValueError",
    "corrupt": "WireError",
    "full-disk": "CheckpointError",
}
"""The error of the rank that has the fault, where it differs from that of the others."""


class Campaign:
    """Injects faults into one job, again and again."""

    def __init__(self, runner: HostRunner, kind: JobKind, faults: int, seed: int) -> None:
        self.faults = faults
        self._runner = runner
        self._random = Random(f"{seed} {kind}")
        self._folder = Path(tempfile.mkdtemp(prefix="gradwire-faults-"))
        per_fault = 2 * MAX_STEPS_TO_FAULT if kind == "async" else STEPS_PER_FAULT
        steps = faults * per_fault + 4 * MAX_STEPS_TO_FAULT
        checksum = "corrupt" in KINDS[kind]
        self._job = Job(
            kind,
            str(self._folder),
            steps,
            spec=SPECS[kind],
            timeout_s=TIMEOUT_S,
            checksum=checksum,
        )
        runner.prepare(self._job)
        self._undisturbed = Attempt()
        if kind != "async":
            self._undisturbed = runner.run(replace(self._job, folder=None, timeout_s=60.0))
            assert self._undisturbed.codes == [0] * WORKERS, self._undisturbed.codes
        self._curve = self._undisturbed.losses()
        self.wrong_losses = 0

    def inject(self, number: int) -> FaultRecord:
        """Runs the job with one fault, and returns a record of how its ranks ended."""
        kinds = KINDS[self._job.kind]
        fault = self._draw(kinds[number % len(kinds)])
        before = self._newest()
        left_out = self._newest_file(fault.rank) if fault.kind == "damaged-file" else None
        if fault.kind in _FILES and not self._newest(left_out):
            # There are no files yet, or the job could not go on from what would be left.
            fault = replace(fault, kind="kill")
        expected = self._break_files(fault)
        attempt = self._runner.run(self._limited(fault), fault, self._react(fault))
        self._restore_files(fault)
        self.wrong_losses += sum(self._is_wrong(*item) for item in attempt.losses().items())
        errors = attempt.of("error")
        return FaultRecord(
            number=number,
            job=self._job.kind,
            fault=fault.kind,
            phase=fault.phase if fault.kind == "kill" else "",
            rank=fault.rank,
            step=fault.step,
            resumed_from=before,
            detected_s=round(_detected_s(attempt, fault), 3),
            errors=dict(Counter(e["kind"] for e in errors)),
            hung=attempt.hung(),
            as_expected=self._is_expected(fault, attempt, before),
            lost_checkpoints=max(0, expected - self._newest()),
            threads_left=sum(len(e["threads"]) for e in errors if e["kind"] == "PeerError"),
        )

    def finish(self) -> bool | None:
        """Returns whether the last restart ends with the weights of the undisturbed run.

        None for asynchronous workers, whose weights depend on the order of their syncs.
        """
        attempt = self._runner.run(replace(self._job, timeout_s=60.0))
        if self._job.kind == "async":
            return None if attempt.codes == [0] * WORKERS else False
        self.wrong_losses += sum(self._is_wrong(*item) for item in attempt.losses().items())
        return attempt.weights() == self._undisturbed.weights()

    def _draw(self, kind: FaultKind) -> Fault:
        rank = self._random.randrange(WORKERS)
        first, last = self._newest(), self._job.steps - 3
        if self._job.kind == "async":
            # A worker without any file of its own could not continue where others have one.
            first = max(self._newest_file(rank)[1], self._job.every)
        return Fault(
            kind,
            rank,
            step=min(first + self._random.randrange(MAX_STEPS_TO_FAULT), last),
            phase=self._draw_phase(),
            delay_s=self._random.uniform(0.0, 0.01),
        )

    def _draw_phase(self) -> Phase:
        # The messages of asynchronous workers pass through no collective.
        phases = ("compute", "save") if self._job.kind == "async" else _PHASES
        return self._random.choice(phases)

    def _limited(self, fault: Fault) -> Job:
        """Returns the job, with an end where the fault does not end it."""
        if self._job.kind == "async" or fault.kind == "damaged-file":
            newest = max(max(files.steps(), default=0) for files in self._files())
            return replace(self._job, steps=min(self._job.steps, newest + 2 * MAX_STEPS_TO_FAULT))
        return self._job

    def _react(self, fault: Fault) -> React | None:
        """Stops the process, or cuts its link, once it has begun the step."""
        if fault.kind not in ("stop", "cut"):
            return None
        acted: list[bool] = []

        def react(event: Event, pids: list[int]) -> None:
            # Asynchronous workers start together, and wait for one that is lost before.
            moments = ("step",) if self._job.kind == "async" else ("begin", "step")
            reached = event["event"] in moments and event["step"] >= fault.step - 1
            if acted or event["rank"] != fault.rank or not reached:
                return
            acted.append(True)
            event["fault_at_s"] = time.monotonic()
            if fault.kind == "stop":
                os.kill(pids[fault.rank], signal.SIGSTOP)
                undo = threading.Timer(TIMEOUT_S + 1, _continue, [pids[fault.rank]])
            else:
                self._runner.testbed.cut(fault.rank)
                undo = threading.Timer(TIMEOUT_S + 1, self._runner.testbed.restore, [fault.rank])
            undo.start()

        return react

    def _is_expected(self, fault: Fault, attempt: Attempt, first: int) -> bool:
        """Returns whether every rank ended by itself, with a named error where it had to fail."""
        if fault.kind == "damaged-file":
            return attempt.codes == [0] * WORKERS
        happened = fault.kind == "missing-files" or bool(_moments_s(attempt))
        if attempt.hung() or not happened:
            return False
        if self._job.kind == "async":
            return self._is_expected_of_async(fault, attempt)
        errors = {e["rank"]: e["kind"] for e in attempt.of("error")}
        return all(
            code == -signal.SIGKILL
            if rank == fault.rank and fault.kind == "kill"
            else code == 1 and errors.get(rank) in self._allowed(fault, rank, first)
            for rank, code in enumerate(attempt.codes)
        )

    def _is_expected_of_async(self, fault: Fault, attempt: Attempt) -> bool:
        """Nobody waits for a lost worker, and all others end without worker 0, the server."""
        others = [code for rank, code in enumerate(attempt.codes) if rank != fault.rank]
        if fault.rank != 0:
            return others == [0] * (WORKERS - 1)
        errors = {e["kind"] for e in attempt.of("error") if e["rank"] != 0}
        return others == [1] * (WORKERS - 1) and errors <= {"PeerError", "PeerTimeout"}

    def _allowed(self, fault: Fault, rank: int, first: int) -> Sequence[str]:
        if fault.kind == "missing-files":
            return ["ConfigError"]
        if fault.kind == "nan":
            return ["NonFiniteError"]
        if rank == fault.rank and fault.kind in _OWN_ERRORS:
            return [_OWN_ERRORS[fault.kind]]
        # FSDP gathers parameters, and DDP broadcasts the order of its buckets after the first step,
        # by collectives of torch, which raise its own errors.
        own = self._job.kind == "fsdp" or (self._job.kind == "ddp" and fault.step == first)
        return ["PeerError", "RuntimeError"] if own else ["PeerError"]

    def _is_wrong(self, at: tuple[int, int], loss: str) -> bool:
        return bool(self._curve) and self._curve[at] != loss

    def _files(self) -> list[Checkpoints]:
        return [Checkpoints(self._folder, rank, WORKERS) for rank in range(WORKERS)]

    def _newest(self, left_out: tuple[int, int] | None = None) -> int:
        """Returns the newest step from which the job can resume, or 0."""
        steps = [set(files.steps()) for files in self._files()]
        if left_out is not None:
            rank, step = left_out
            steps[rank].discard(step)
        if self._job.kind == "async":
            return min(max(own, default=0) for own in steps)
        return max(set.intersection(*steps), default=0)

    def _break_files(self, fault: Fault) -> int:
        """Hides or damages files; returns the newest step that the others still allow."""
        if fault.kind == "missing-files":
            before = self._newest()
            (self._folder / "away").mkdir()
            for path in self._of_rank(fault.rank):
                path.rename(self._folder / "away" / path.name)
            return before
        if fault.kind == "damaged-file":
            newest = max(self._of_rank(fault.rank))
            expected = self._newest(left_out=self._newest_file(fault.rank))
            content = bytearray(newest.read_bytes())
            content[len(content) // 2] ^= 1
            newest.write_bytes(content)
            return expected
        return self._newest()

    def _restore_files(self, fault: Fault) -> None:
        if fault.kind == "missing-files":
            for path in (self._folder / "away").iterdir():
                path.rename(self._folder / path.name)
            (self._folder / "away").rmdir()

    def _newest_file(self, rank: int) -> tuple[int, int]:
        """Returns the rank and the step of its newest file, or 0."""
        return rank, max(self._files()[rank].steps(), default=0)

    def _of_rank(self, rank: int) -> list[Path]:
        return list(self._folder.glob(f"step*-rank{rank}of{WORKERS}-*.pt"))


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:  # it ended, or was killed as hung
        return


def _detected_s(attempt: Attempt, fault: Fault) -> float:
    """Returns the time from the fault to the last error of another rank; -1 without one."""
    starts = _moments_s(attempt)
    ends = [e["at_s"] for e in attempt.of("error") if e["rank"] != fault.rank]
    return max(ends) - min(starts) if starts and ends else -1.0


def _moments_s(attempt: Attempt) -> list[float]:
    """Returns the moments at which a fault happened."""
    inside = [e["at_s"] for e in attempt.of("fault")]
    return inside + [e["fault_at_s"] for e in attempt.events if "fault_at_s" in e]


@dataclass(frozen=True)
class FaultBench:
    """Runs a campaign for each job, with an equal share of the faults."""

    faults: int
    jobs: tuple[str, ...]
    seed: int
    minutes: float
    json_path: Path | None
    command: str

    def __post_init__(self) -> None:
        check_whole("faults", "faults", self.faults, 1)
        for job in self.jobs:
            if job not in JOBS:
                raise ConfigError(f"faults: jobs must be among {list(JOBS)}, got {job!r}")

    def run(self, console: Console) -> bool:
        """Returns whether no process hung, no checkpoint was lost and every job ended as it should.

        Each campaign stops early when its share of the time is over.
        """
        if self.json_path is not None:
            check_writable(self.json_path)
        if (reason := Testbed.reason_unavailable()) is not None:
            raise ConfigError(f"faults: needs emulated hosts: {reason}")
        good = True
        with Testbed(WORKERS, RATE) as testbed:
            runner = HostRunner(testbed, quiet=True)
            time_left = TimeLeft()
            for number, job in enumerate(self.jobs):
                share = self.faults // len(self.jobs) + (number < self.faults % len(self.jobs))
                summary = self._campaign(console, runner, job, share, time_left)
                good = good and not is_bad(summary)
        return good

    def _campaign(
        self, console: Console, runner: HostRunner, kind: str, faults: int, time_left: TimeLeft
    ) -> CampaignRecord:
        start_s = time.monotonic()
        job: JobKind = next(known for known in JOBS if known == kind)
        campaign = Campaign(runner, job, faults, self.seed)
        rows: list[FaultRecord] = []
        limit_s = 60 * self.minutes / len(self.jobs)
        while len(rows) < faults and time.monotonic() - start_s < limit_s:
            rows.append(campaign.inject(len(rows)))
            self._write(rows[-1])
            # Every job has the same share of the faults and of the time.
            done = self.jobs.index(job) + len(rows) / faults
            left = time_left.words(done, len(self.jobs), 60 * self.minutes)
            console.print(_line(rows[-1]) + left, markup=False, highlight=False)
        same = campaign.finish()
        times = [row.detected_s for row in rows if row.detected_s >= 0]
        summary = CampaignRecord(
            job=job,
            spec=SPECS[job],
            faults=len(rows),
            seed=self.seed,
            workers=WORKERS,
            rate=RATE,
            timeout_s=TIMEOUT_S,
            hung=sum(row.hung for row in rows),
            unexpected=sum(not row.as_expected for row in rows),
            lost_checkpoints=sum(row.lost_checkpoints for row in rows),
            wrong_losses=campaign.wrong_losses,
            same_weights=same,
            max_detected_s=max(times, default=-1.0),
            took_s=round(time.monotonic() - start_s, 1),
            command=self.command,
            machine=machine_facts(),
        )
        self._write(summary)
        console.print(_summary_line(summary), markup=False, highlight=False)
        return summary

    def _write(self, record: FaultRecord | CampaignRecord) -> None:
        if self.json_path is not None:
            append(self.json_path, record)


def is_bad(campaign: CampaignRecord) -> bool:
    broken = campaign.hung or campaign.lost_checkpoints or campaign.wrong_losses
    return bool(broken or campaign.unexpected or campaign.same_weights is False)


def _line(row: FaultRecord) -> str:
    what = f"{row.fault} in {row.phase}" if row.phase else row.fault
    errors = ", ".join(f"{count} {kind}" for kind, count in row.errors.items()) or "no error"
    problems = [
        *(["HUNG"] if row.hung else []),
        *(["CHECKPOINT LOST"] if row.lost_checkpoints else []),
        *([] if row.as_expected else ["UNEXPECTED"]),
    ]
    after = f" after {row.detected_s:.1f} s" if row.detected_s >= 0 else ""
    return (
        f"{row.number:4} {row.job}: {what} on rank {row.rank} at step {row.step}: "
        f"{errors}{after} {' '.join(problems)}".rstrip()
    )


def _summary_line(campaign: CampaignRecord) -> str:
    same = {True: "equal weights", False: "OTHER WEIGHTS", None: "weights not compared"}
    return (
        f"{campaign.job}: {campaign.faults} faults, {campaign.hung} hangs, "
        f"{campaign.lost_checkpoints} lost checkpoints, {campaign.unexpected} unexpected ends, "
        f"{campaign.wrong_losses} wrong losses, {same[campaign.same_weights]}; "
        f"{campaign.took_s:.0f} s"
    )
