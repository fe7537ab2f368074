"""Code blocks of a page, and shell blocks run as they are printed."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from deadlines import scaled

DOCS = Path(__file__).parents[2] / "docs"

PROGRAMS = {
    "python": "",
    "torchrun": "-m torch.distributed.run --standalone",
    "gradwire": "-m gradwire",
}
"""Commands of pages, as modules of the Python that runs the tests.

Without `--standalone` torchrun's port is fixed, and other tests may have it.
"""


def titled_blocks(page: str) -> dict[str, str]:
    """Returns the blocks of a page that have a title, by it."""
    text = (DOCS / page).read_text("utf-8")
    found = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', text, re.M | re.S))
    assert found, f"{page} has no titled block"
    return found


def shortened(text: str, changes: Mapping[str, str]) -> str:
    """Returns a block in small form; every text that is replaced must be there."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def run_shell(script: str, folder: Path, limit_s: float = 50) -> str:
    """Runs a shell block in a folder; returns what it prints."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, module in PROGRAMS.items():
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        path.chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    imports = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": imports, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=scaled(limit_s),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout
