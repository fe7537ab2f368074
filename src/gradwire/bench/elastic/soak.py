"""`gradwire bench elastic`: kills replicas at random, starts them again, and checks every step."""

import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import mean, median

from rich.console import Console

from gradwire.bench.elastic.replica import BASELINES, LOCAL, Step
from gradwire.bench.elastic.supervisor import HEARTBEAT_TIMEOUT_MS, JOIN_TIMEOUT_MS, Supervisor
from gradwire.bench.machine import machine_facts
from gradwire.bench.records.files import append, check_writable
from gradwire.bench.records.schema import ElasticRecord
from gradwire.checks import check_whole
from gradwire.errors import MissingExtra
from gradwire.policies import check_method

PATIENCE_S = 60.0
"""Seconds without a committed step after which the job counts as hung."""

FEWEST = 2
"""Replicas with the state of the job that are left alive: without one the state would be gone."""

JOINING_SHARE = 0.25
"""Share of the kills that hit a replica which is still joining, if there is one."""

SAME_STEP_S = 10.0
"""Seconds within which all replicas end a step."""

LOSSES = 40
"""Losses of which the first and the last mean are taken."""


@dataclass
class Soak:
    """One run of one case: state of the job as its events come in."""

    supervisor: Supervisor
    random: Random
    replicas: int

    def __post_init__(self) -> None:
        self._digests: dict[int, Step] = {}
        self.steps = self.compared = self.wrong_steps = self.rollbacks = 0
        self.repeated_steps = 0
        self.hit_member: list[bool] = []
        self.losses: list[float] = []
        self.recovery_s: list[float] = []
        self.rejoin_s: list[float] = []
        self.last: dict[int, Step] = {}
        """The last committed step of each replica that is alive."""
        self._started_s: dict[int, float] = {}
        self._sent: dict[int, tuple[int, int]] = {}
        self.bytes_per_step: list[float] = []

    def start(self, number: int) -> None:
        self._started_s[number] = time.monotonic()
        self.supervisor.start(number)

    def kill_one(self) -> float:
        """Kills a replica, sometimes one that is still joining; returns the moment."""
        self._drop_ended()
        ready, alive = sorted(self.last), self.supervisor.alive()
        joining = [number for number in alive if number not in self.last]
        may_kill_members = len(ready) > FEWEST or not joining
        prefers_joining = joining and self.random.random() < JOINING_SHARE
        number = self.random.choice(ready if may_kill_members and not prefers_joining else joining)
        self.hit_member.append(number in self.last)
        self._forget(number)
        return self.supervisor.kill(number)

    def _forget(self, number: int) -> None:
        self.last.pop(number, None)
        self._sent.pop(number, None)

    def _drop_ended(self) -> None:
        """Forgets replicas that ended by themselves."""
        for number in [n for n in self.last if n not in self.supervisor.alive()]:
            self._forget(number)

    def missing(self) -> list[int]:
        self._drop_ended()
        return [n for n in range(self.replicas) if n not in self.supervisor.alive()]

    def note(self, step: Step) -> None:
        if not step.committed:
            self.rollbacks += 1
            return
        if step.replica not in self.last:
            self.rejoin_s.append(step.ended_s - self._started_s[step.replica])
        self.last[step.replica] = step
        self._compare(step)
        if step.loss is not None:
            self.losses.append(step.loss)
        before, sent = self._sent.get(step.replica, (step.step, 0))
        if step.step == before + 1 and step.replicas == self.replicas:
            self.bytes_per_step.append(step.sent_bytes - sent)
        self._sent[step.replica] = step.step, step.sent_bytes

    def _compare(self, step: Step) -> None:
        """Compares the parameters with those of the replica that was the first after this step."""
        first = self._digests.get(step.step)
        if first is None or step.ended_s - first.ended_s > SAME_STEP_S:
            self._digests[step.step] = step
            self.steps += 1
            self.repeated_steps += first is not None
            return
        self.compared += 1
        self.wrong_steps += step.digest != first.digest

    def wait(self, limit_s: float) -> None:
        """Collects steps for some time."""
        for step in self.supervisor.steps(limit_s):
            self.note(step)

    def wait_for_commit(self, after_s: float) -> float | None:
        """Returns the end of the first committed step that began after a moment; None if hung."""
        for step in self.supervisor.steps(PATIENCE_S):
            self.note(step)
            if step.committed and step.started_s > after_s:
                return step.ended_s
        return None

    def wait_for_all(self, steps: int) -> bool:
        """Waits until all replicas have committed so many more steps together; False if hung."""
        done = 0
        for step in self.supervisor.steps(PATIENCE_S):
            self.note(step)
            done += step.committed and step.replicas == self.replicas
            if done >= steps * self.replicas:
                return True
            for number in self.missing():
                self.start(number)
        return False

    def typical_bytes(self) -> float | None:
        """Returns the bytes that a replica sends in a step in which all are present."""
        return median(self.bytes_per_step) if self.bytes_per_step else None


@dataclass(frozen=True)
class ElasticBench:
    """Runs the soak for each case."""

    kills: int
    cases: tuple[str, ...]
    replicas: int
    seed: int
    minutes: float
    json_path: Path | None
    command: str

    def __post_init__(self) -> None:
        check_whole("elastic", "kills", self.kills, 1)
        check_whole("elastic", "replicas", self.replicas, FEWEST + 1)
        for case in self.cases:
            if case not in (*BASELINES, *LOCAL):
                check_method(case)
        if find_spec("torchft") is None:
            raise MissingExtra("gradwire bench elastic", "torchft", "torchft")

    def run(self, console: Console) -> bool:
        """Returns whether every kill was survived and all parameters were always equal."""
        if self.json_path is not None:
            check_writable(self.json_path)
        good = True
        for case in self.cases:
            record = self._run(console, case)
            if self.json_path is not None:
                append(self.json_path, record)
            console.print(summary(record), markup=False, highlight=False)
            good = good and not is_bad(record)
        return good

    def _run(self, console: Console, case: str) -> ElasticRecord:
        start_s = time.monotonic()
        # The same seed kills alike in every case, as far as their speed allows.
        random = Random(self.seed)
        limit_s = 60 * self.minutes / len(self.cases)
        hung = False
        with Supervisor(case) as supervisor:
            soak = Soak(supervisor, random, self.replicas)
            for number in range(self.replicas):
                soak.start(number)
            hung = not soak.wait_for_all(10)
            kills = 0
            while kills < self.kills and not hung and time.monotonic() - start_s < limit_s:
                soak.wait(random.uniform(0.5, 4.0))
                killed_s = soak.kill_one()
                kills += 1
                recovered_s = soak.wait_for_commit(killed_s)
                hung = recovered_s is None
                if recovered_s is not None:
                    soak.recovery_s.append(recovered_s - killed_s)
                    text = f"{case}: kill {kills}, next commit after {soak.recovery_s[-1]:.2f} s"
                    console.print(text, markup=False, highlight=False)
                soak.wait(random.uniform(0.0, 1.0))
                for number in soak.missing():
                    soak.start(number)
            hung = hung or not soak.wait_for_all(50)
        return ElasticRecord(
            spec=case,
            replicas=self.replicas,
            kills=kills,
            hit_member=tuple(soak.hit_member),
            survived=len(soak.recovery_s),
            hung=hung,
            unexpected=tuple(supervisor.ended),
            repeated_steps=soak.repeated_steps,
            steps=soak.steps,
            compared=soak.compared,
            wrong_steps=soak.wrong_steps,
            rollbacks=soak.rollbacks,
            recovery_s=tuple(round(value, 3) for value in soak.recovery_s),
            rejoin_s=tuple(round(value, 3) for value in soak.rejoin_s),
            first_loss=round(mean(soak.losses[:LOSSES]), 4) if soak.losses else None,
            last_loss=round(mean(soak.losses[-LOSSES:]), 4) if soak.losses else None,
            sent_bytes=None if case in BASELINES else soak.typical_bytes(),
            join_timeout_ms=JOIN_TIMEOUT_MS,
            heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
            seed=self.seed,
            took_s=round(time.monotonic() - start_s, 1),
            command=self.command,
            machine=machine_facts(),
        )


def is_bad(record: ElasticRecord) -> bool:
    return bool(
        record.hung
        or record.unexpected
        or record.wrong_steps
        or record.repeated_steps
        or record.survived < record.kills
        or record.last_loss is None
        or record.first_loss is None
        or record.last_loss >= record.first_loss
    )


def summary(record: ElasticRecord) -> str:
    times = sorted(record.recovery_s) or [0.0]
    return (
        f"{record.spec}: {record.survived} of {record.kills} kills survived"
        f"{', HUNG' if record.hung else ''}, {record.wrong_steps} of {record.steps} steps with "
        f"different parameters, {record.rollbacks} rolled back, next commit after "
        f"{median(times):.2f} s (median), {times[-1]:.2f} s (most); loss {record.first_loss} -> "
        f"{record.last_loss}{_unexpected(record)}; "
        f"{record.took_s:.0f} s"
    )


def _unexpected(record: ElasticRecord) -> str:
    if not record.unexpected:
        return ""
    ends = f"{len(record.unexpected)} REPLICAS ENDED ({record.unexpected[0]}, ...)"
    return f"; {ends}, and {record.repeated_steps} steps were repeated"
