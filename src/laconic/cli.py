"""The command line: reads arguments and prints; the work is done by the modules it calls."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from laconic.errors import LaconicError

_USER_ERROR = 2
_INTERRUPTED = 130

app = typer.Typer(
    name="laconic",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run() -> None:
    """Runs the command line; an error that is the user's to mend is one line, not a traceback."""
    try:
        app()
    except LaconicError as error:
        print(f"laconic: {error}", file=sys.stderr)
        sys.exit(_USER_ERROR)


@app.callback()
def laconic() -> None:
    """Distributed training that says the most in the fewest bytes."""


# Options end at the first word of the command, so that its own options need no "--".
@app.command(context_settings={"allow_interspersed_args": False})
def net(
    command: Annotated[
        list[str] | None, typer.Argument(help="What every worker runs.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(help="Emulated hosts, one worker on each.")] = 4,
    rate: Annotated[
        str | None,
        typer.Option(help="Rate of every link, up and down, such as 100mbit; else unshaped."),
    ] = None,
) -> None:
    """Runs a command on emulated hosts with links of a given rate (Linux, root).

    Every worker has torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR ...) and a host of its
    own. The first exit code that is not 0 is passed on, and ends the other workers.
    """
    from laconic.network.cluster import run_on_testbed

    try:
        code = run_on_testbed(command or [], workers, rate)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    raise typer.Exit(code)
