"""Output of commands: tables and progress, the text of results, and records as JSON lines.

With `--quiet` only errors and records are printed. If records go to standard output, all other text
goes to standard error, so that `--json -` can be piped.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Prints errors and records only.")]

_STANDARD_OUTPUT = Path("-")
_FILE_COLUMNS = 120
_QUIET = ContextVar("quiet", default=False)


def with_quiet(command: Callable[P, None]) -> Callable[..., None]:
    """Adds the option --quiet to a command."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        token = _QUIET.set(bool(kwargs.pop("quiet", False)))
        try:
            command(*args, **kwargs)
        finally:
            _QUIET.reset(token)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter(
        "quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet
    )
    parameters = [*signature.parameters.values(), option]
    # Typer reads both.
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def open_console(json: Path | None = None) -> Console:
    """Opens the terminal; a file or a pipe gets lines long enough for the tables."""
    from rich.console import Console

    on_stderr, quiet = json == _STANDARD_OUTPUT, _QUIET.get()
    console = Console(stderr=on_stderr, quiet=quiet)
    if console.is_terminal:
        return console
    return Console(stderr=on_stderr, quiet=quiet, width=_FILE_COLUMNS)


def show(text: object, json: Path | None = None) -> None:
    """Prints the text of a result."""
    if not _QUIET.get():
        print(text, file=sys.stderr if json == _STANDARD_OUTPUT else sys.stdout)


def write_rows(json: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Appends rows that are no records of measurements to a file, or prints them."""
    from gradwire.bench.records.files import append_row

    for row in rows:
        append_row(json, row)
