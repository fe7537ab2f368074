import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("start_methods.py")


@pytest.mark.timeout(150)
def test_fork_and_spawn_do_the_same(tmp_path: Path) -> None:
    runs = {
        method: subprocess.Popen(
            [sys.executable, str(SCRIPT), method, str(tmp_path / method)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for method in ("fork", "spawn")
    }
    told = set()
    for method, run in runs.items():
        out, complaints = run.communicate(timeout=140)
        assert run.returncode == 0, f"{method}: {complaints[-3000:]}"
        lines = [line.split() for line in out.splitlines()]
        assert sorted(rank for rank, _, _ in lines) == ["0", "1"]
        assert "terminate called" not in complaints
        told |= {(steps, weights) for _, steps, weights in lines}
    assert len(told) == 1
    assert told.pop()[0] == "6"
