"""Real replicas with torchft: kills, rejoining, and a newcomer that is refused."""

import re
import subprocess
import sys
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from deadlines import scaled
from gradwire.bench.elastic.replica import Step
from gradwire.bench.elastic.supervisor import Supervisor

REPLICAS = 3
pytestmark = pytest.mark.skipif(
    find_spec("torchft") is None, reason="torchft is not installed; make test-torchft installs it"
)


class Job:
    """The replicas of a job, and what they have committed."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.digests: dict[int, set[str]] = defaultdict(set)
        self.losses: list[float] = []

    def wait_for(self, replicas: int, steps: int, since_s: float = 0.0) -> Step:
        """Returns the last of some committed steps with so many replicas."""
        left = steps * replicas
        for step in self.supervisor.steps(scaled(40)):
            if not step.committed:
                continue
            self.digests[step.step].add(step.digest)
            if step.loss is not None:
                self.losses.append(step.loss)
            left -= step.replicas == replicas and step.started_s > since_s
            if left <= 0:
                return step
        raise AssertionError(f"hung; {self.supervisor.ended}")

    def check(self) -> None:
        assert not self.supervisor.ended
        assert len(self.digests) > 20
        assert all(len(found) == 1 for found in self.digests.values())
        third = len(self.losses) // 3
        assert sum(self.losses[-third:]) < sum(self.losses[:third])


@pytest.mark.parametrize("case", ["topk:ratio=0.01", "powersgd:rank=2", "sparseloco"])
@pytest.mark.timeout(150)
def test_a_killed_replica_joins_again(case: str) -> None:
    with Supervisor(case) as supervisor:
        job = Job(supervisor)
        for number in range(REPLICAS):
            supervisor.start(number)
        job.wait_for(REPLICAS, 10)
        # The first replica has the store through which the others have found each other.
        for victim in (0, 1):
            killed_s = supervisor.kill(victim)
            job.wait_for(REPLICAS - 1, 5, since_s=killed_s)
            supervisor.start(victim)
            job.wait_for(REPLICAS, 10, since_s=time.monotonic())
        job.check()


@pytest.mark.timeout(150)
def test_a_newcomer_with_another_spec_ends_alone() -> None:
    with Supervisor("topk:ratio=0.01") as supervisor:
        job = Job(supervisor)
        for number in range(2):
            supervisor.start(number)
        job.wait_for(2, 10)
        supervisor.start(2, case="topk:ratio=0.02")
        while not supervisor.ended:
            job.wait_for(2, 5)
        job.wait_for(2, 20)
        (end,) = supervisor.ended
        text = "replica 2: exit code 1 gradwire.errors.ConfigError: replica 2 cannot join replica 0"
        assert end.startswith(text)
        supervisor.ended.clear()
        job.check()


@pytest.mark.timeout(150)
def test_the_example_trains() -> None:
    script = Path(__file__).parents[2] / "examples" / "elastic.py"
    with Supervisor("none") as lighthouse:
        options = ["--lighthouse", lighthouse.address, "--steps", "60"]
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), "--replica", str(number), "--width", "64", *options],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for number in range(2)
        ]
        for process in processes:
            printed, _ = process.communicate(timeout=scaled(60))
            (accuracy,) = re.findall(r"accuracy ([\d.]+), \d+ commits", printed)
            assert float(accuracy) > 0.3
