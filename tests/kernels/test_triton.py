"""The Triton kernels in Triton's own interpreter, which needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("interpreted.py")


def test_kernels_of_the_card_mean_what_the_reference_says() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    paths = [str(WORKER.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = {"roundings": 156, "sides": 24, "trits": 24, "signs": 11, "votes": 12}
    assert json.loads(done.stdout) == counts
