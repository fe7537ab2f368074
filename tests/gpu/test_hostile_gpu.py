"""Hostile bytes on a GPU are decoded as on the CPU, or refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    pytest.mark.timeout(300),
]
SCRIPT = Path(__file__).with_name("hostile_gpu.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


def test_hostile_messages_are_decoded_or_refused() -> None:
    process = run("1000")
    assert process.returncode == 0, process.stderr[-2000:]
    assert "'decoded'" in process.stdout


def test_the_gpu_stops_at_positions_out_of_range() -> None:
    """Runs in a process of its own, since the GPU is unusable in it after a device assertion."""
    process = run("--refused")
    assert process.returncode != 0
    assert "assert" in process.stderr.lower()
