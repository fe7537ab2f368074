"""The Triton kernels of sparsifiers in Triton's own interpreter, which needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("interpreted_sparse.py")
DONE = {
    "positions": {
        "widths": 3,
        "choices": 4,
        "fits": 11,
        "does not fit": 22,
        "blocks": 4,
        "entries": 8,
    },
    "selections": {"selections": 10},
    "more selections": {"selections": 10},
    "borders": {"borders": 16, "stages": 12},
    "messages": {"messages": 15},
    "more messages": {"messages": 15},
    "large": {"messages": 6},
    "casts": {"casts": 20},
}


@pytest.mark.parametrize("part", DONE)
def test_kernels_of_the_card_mean_what_the_reference_says(part: str) -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER), part],
        # It shares what the tests share.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == DONE[part]
