"""torchrun restarts a job after a worker was killed, and it resumes from its checkpoint."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deadlines import scaled
from gradwire.bench.faults.injection import Fault
from gradwire.bench.faults.jobs import Job

# torchrun keeps one store for all attempts, in which a new one may find the addresses of the last
# (https://github.com/pytorch/pytorch/issues/135712), unless this variable is set.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL", "OMP_NUM_THREADS": "1"}
SCRIPT = Path(__file__).with_name("torchrun_job.py")
TIME_LIMIT_S = 150


@pytest.mark.timeout(TIME_LIMIT_S)
def test_a_restarted_job_resumes_bitwise(tmp_path: Path) -> None:
    """Runs one job undisturbed; then an equal one is killed after its second checkpoint."""
    alone = Job(folder=str(tmp_path / "alone"), timeout_s=30)
    killed = Job(folder=str(tmp_path / "killed"), timeout_s=30)
    jobs = [
        (asdict(alone), None),
        (asdict(killed), asdict(Fault("kill", rank=1, step=5, phase="wire"))),
    ]
    events = torchrun([json.dumps(jobs)])

    first, again = (of(events, name, "begin") for name in ("alone", "killed"))
    assert {e["step"] for e in first if e["restarts"] == 0} == {0}
    assert {e["step"] for e in again if e["restarts"] == 0} == {0}
    assert {e["step"] for e in again if e["restarts"] == 1} == {4}
    assert len([e for e in events if e["event"] == "fault"]) == 1

    curve = {(e["rank"], e["step"]): e["loss"] for e in of(events, "alone", "step")}
    assert len(curve) == 2 * alone.steps
    rerun = of(events, "killed", "step")
    assert all(curve[e["rank"], e["step"]] == e["loss"] for e in rerun)
    assert {(e["rank"], e["step"]) for e in rerun} == curve.keys()
    weights = {e["weights"] for name in ("alone", "killed") for e in of(events, name, "end")}
    assert len(weights) == 1


def of(events: list[dict[str, Any]], folder: str, event: str) -> list[dict[str, Any]]:
    return [e for e in events if e["event"] == event and Path(e["folder"]).name == folder]


def torchrun(arguments: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1"]
    done = subprocess.run(
        [*command, str(SCRIPT), *arguments],
        env={**os.environ, **OWN_STORE, **QUIET},
        capture_output=True,
        text=True,
        timeout=scaled(TIME_LIMIT_S - 10),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
