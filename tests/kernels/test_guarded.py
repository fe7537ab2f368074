"""Compiled decoders never access memory outside their arguments."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(120)
def test_no_decoder_touches_a_forbidden_page() -> None:
    script = Path(__file__).with_name("guarded.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "3780 calls survived\n"
