"""What commands share at their two ends: how they were called, where they print, how they end."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from laconic.bench.races.race import Ending

INTERRUPTED = 130
_CODES: dict[Ending, int] = {"done": 0, "failed": 1, "interrupted": INTERRUPTED}
_FILE_COLUMNS = 120


def open_console() -> Console:
    """The terminal as it is; a file or a pipe gets lines that are long enough for the tables."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_FILE_COLUMNS)


def command_line() -> str:
    """How we were called, for the records."""
    return shlex.join(["laconic", *sys.argv[1:]])


def leave(ending: Ending) -> None:
    """Ends the process, with the exit code by which a script sees how its work ended."""
    raise typer.Exit(_CODES[ending])
