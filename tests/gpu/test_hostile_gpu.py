"""Hostile bytes on a card: decoded as on the CPU, or refused."""

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
    done = run("1000")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'decoded'" in done.stdout


def test_a_card_stops_at_positions_out_of_range() -> None:
    """In a process of its own, since the card serves it no more after that."""
    done = run("--refused")
    assert done.returncode != 0
    assert "assert" in done.stderr.lower()
