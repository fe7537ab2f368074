"""Time limits scale with the option and the load, in this process and in those it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import deadlines

TESTS = Path(__file__).parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(deadlines.VARIABLE, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.mark.parametrize(("load", "factor"), [(1.0, 1.0), (6.0, 3.0), (1000.0, 10.0)])
def test_the_load_scales_limits(
    idle: None, monkeypatch: pytest.MonkeyPatch, load: float, factor: float
) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "getloadavg", lambda: (load * cores, 0.0, 0.0))
    assert deadlines.scaled(60) == 60 * factor


def test_the_option_is_the_smallest_factor(idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(deadlines.VARIABLE, "1")
    deadlines.set_slow_machine(4)
    assert deadlines.scaled(0.5) == 2


@pytest.mark.parametrize(("factor", "code"), [("1", 1), ("40", 0)])
def test_a_limit_that_is_too_short_ends_a_test_unless_the_machine_is_slow(
    tmp_path: Path, factor: str, code: int
) -> None:
    # With the real conftest and the real plug-in, of which all tests get their limit.
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_slow.py").write_text(
        "import time, pytest\n@pytest.mark.timeout(0.05)\ndef test_it():\n    time.sleep(1)\n"
    )
    done = subprocess.run(
        [*PYTEST, "-o", "addopts=", "--slow-machine", factor, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{TESTS}"},
        capture_output=True,
        text=True,
        timeout=deadlines.scaled(50),
        check=False,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
