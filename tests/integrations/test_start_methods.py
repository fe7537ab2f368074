import subprocess
import sys
from pathlib import Path

import pytest

from deadlines import scaled

SCRIPT = Path(__file__).with_name("start_methods.py")


def trained(method: str, store: Path) -> dict[str, tuple[str, str]]:
    """Returns the number of steps of each rank, and a hash of its weights."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), method, str(store)],
        capture_output=True,
        text=True,
        timeout=scaled(70),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "terminate called" not in done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("trained")]
    return {rank: (steps, weights) for _, rank, steps, weights in lines}


@pytest.mark.timeout(150)
def test_fork_and_spawn_do_the_same(tmp_path: Path) -> None:
    forked, spawned = (trained(method, tmp_path / method) for method in ("fork", "spawn"))
    assert forked == spawned
    assert forked.keys() == {"0", "1"}
    assert forked["0"] == forked["1"]
    assert forked["0"][0] == "6"
