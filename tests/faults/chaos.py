"""Kills random ranks at random moments, restarts from checkpoints, and checks the results.

By hand (Linux, root): `python tests/faults/chaos.py --kills 50 --json chaos.jsonl`.
"""

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from fault_injection import PHASES, Fault
from job_runner import Attempt, HostRunner
from killable_job import Job

from gradwire.bench.machine import machine_facts
from gradwire.bench.records.files import append, to_row
from gradwire.bench.records.schema import ChaosRecord, KillRecord
from gradwire.checkpoint.files import Checkpoints
from gradwire.testbed.hosts import Testbed

WORKERS = 4
RATE = "100mbit"
STEPS_PER_KILL = 3
MAX_STEPS_TO_KILL = 6
"""A kill happens within so many steps of a restart."""


class Chaos:
    """Kills a job again and again, and compares it with an undisturbed run."""

    def __init__(self, runner: HostRunner, kills: int, seed: int, spec: str, folder: Path) -> None:
        self.kills = kills
        self._runner = runner
        self._random = Random(seed)
        steps = kills * STEPS_PER_KILL + 2 * MAX_STEPS_TO_KILL
        self._job = Job(str(folder), steps=steps, spec=spec)
        self._undisturbed = runner.run(Job(steps=steps, spec=spec))
        assert self._undisturbed.codes == [0] * WORKERS, self._undisturbed.codes
        self._curve = self._undisturbed.losses()
        self.wrong_losses = 0
        self.corrupted = 0
        self.unfinished: set[tuple[str, int]] = set()

    def kill(self, number: int) -> KillRecord:
        """Kills one rank and returns a record of how the others ended."""
        first = self._newest()
        fault = Fault(
            rank=self._random.randrange(WORKERS),
            step=min(first + self._random.randrange(MAX_STEPS_TO_KILL), self._job.steps - 3),
            phase=self._random.choice(PHASES),
            delay_s=self._random.uniform(0.0, 0.01),
        )
        attempt = self._runner.run(self._job, fault)
        self._inspect(attempt)
        errors = attempt.of("error")
        survivors = [code for rank, code in enumerate(attempt.codes) if rank != fault.rank]
        return KillRecord(
            kill=number,
            rank=fault.rank,
            step=fault.step,
            phase=fault.phase,
            resumed_from=first,
            detected_s=round(max(attempt.detected_s(), default=-1.0), 3),
            errors=dict(Counter(e["kind"] for e in errors)),
            ended=attempt.codes[fault.rank] == -9 and survivors == [1] * (WORKERS - 1),
            threads_left=sum(len(e["threads"]) for e in errors if e["kind"] == "PeerError"),
        )

    def finish(self) -> bool:
        """Returns whether the last restart ends with the weights of the undisturbed run."""
        attempt = self._runner.run(self._job)
        self._inspect(attempt)
        return attempt.weights() == self._undisturbed.weights()

    def _newest(self) -> int:
        files = [Checkpoints(self._job.folder or "", rank, WORKERS) for rank in range(WORKERS)]
        return max(set.intersection(*(set(one.steps()) for one in files)), default=0)

    def _inspect(self, attempt: Attempt) -> None:
        self.wrong_losses += sum(self._curve[at] != loss for at, loss in attempt.losses().items())
        folder = Path(self._job.folder or "")
        finished = [Checkpoints(folder, rank, WORKERS) for rank in range(WORKERS)]
        sound = sum(len(one.steps()) for one in finished)
        self.corrupted += len(list(folder.glob("*.pt"))) - sound
        self.unfinished |= {(p.name, p.stat().st_mtime_ns) for p in folder.glob("*.tmp")}


def run(kills: int, seed: int, spec: str, folder: Path) -> list[KillRecord | ChaosRecord]:
    """Returns a record of each kill, and a summary."""
    start_s = time.monotonic()
    with Testbed(WORKERS, RATE) as testbed:
        chaos = Chaos(HostRunner(testbed, Job(spec=spec)), kills, seed, spec, folder)
        rows = [chaos.kill(number) for number in range(kills)]
        same = chaos.finish()
    times = [row.detected_s for row in rows]
    timeout_s = Job().timeout_s
    summary = ChaosRecord(
        kills=kills,
        seed=seed,
        spec=spec,
        workers=WORKERS,
        rate=RATE,
        timeout_s=timeout_s,
        detected=sum(0 <= t <= timeout_s + 5 for t in times),
        max_detected_s=max(times),
        ended=sum(row.ended for row in rows),
        wrong_losses=chaos.wrong_losses,
        corrupted_checkpoints=chaos.corrupted,
        unfinished_files_ignored=len(chaos.unfinished),
        same_weights=same,
        took_s=round(time.monotonic() - start_s, 1),
        command=shlex.join(["python", "tests/faults/chaos.py", *sys.argv[1:]]),
        machine=machine_facts(),
    )
    return [*rows, summary]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spec", default="topk:ratio=0.1")
    parser.add_argument("--json", type=Path, help="adds the rows to this file")
    options = parser.parse_args()
    # No context manager: every forked child would exit it too, and remove the folder.
    folder = Path(tempfile.mkdtemp())
    rows = run(options.kills, options.seed, options.spec, folder)
    shutil.rmtree(folder)
    for row in rows:
        print(json.dumps(to_row(row)), flush=True)
        if options.json is not None:
            append(options.json, row)


if __name__ == "__main__":
    main()
