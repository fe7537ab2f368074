"""The code of docs/how-to/logging.md runs, and the real loggers have the numbers afterwards."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from logging_jobs import PAGE, STEPS

from gradwire.engine.last_step import LastStep
from processes import free_port

LOGGERS = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "lightning": "tensorboard",
    "accelerate": "tensorboard",
    "transformers": "tensorboard",
}


def run_example(title: str, folder: Path) -> str:
    command = [sys.executable, str(PAGE.parents[2] / "tests/docs/logging_jobs.py")]
    # MLflow's plain files need no database.
    environment = {**os.environ, "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run(
        [*command, title, str(folder), str(free_port())],
        cwd=folder,
        env={**environment, "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("title", LOGGERS)
def test_a_logger_has_the_bytes_of_every_step(title: str, tmp_path: Path) -> None:
    if find_spec(LOGGERS[title]) is None:
        pytest.skip(f"{LOGGERS[title]} is not installed here; make test-logging installs it")
    assert f"sent_bytes {STEPS}" in run_example(title, tmp_path)


def test_a_trace_has_the_three_ranges(tmp_path: Path) -> None:
    run_example("trace", tmp_path)
    text = (tmp_path / "trace.json").read_text()
    assert all(f'"gradwire::{phase}"' in text for phase in ("encode", "wire", "decode"))


def test_log_lines_of_rank_0_are_shown(tmp_path: Path) -> None:
    run_example("lines", tmp_path)


def test_the_page_explains_all_numbers() -> None:
    from gradwire.comm.meter import Meter
    from gradwire.engine.engine import Engine  # noqa: F401

    last = LastStep(Meter(), "all")
    last.end(0)
    last.end(0)
    names = last.numbers("", 1, [], 1)
    assert len(names) > 14
    assert not [name for name in names if f"`{name}`" not in PAGE.read_text()]
