"""The command line: reads arguments and prints; the work is done by the modules it calls."""

import sys
from typing import Annotated

import typer

from laconic.cli import bench_here, bench_hosts, catalogue, cluster, forecast, report, study
from laconic.errors import LaconicError
from laconic.version import VERSION

_USER_ERROR = 2

app = typer.Typer(
    name="laconic",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(no_args_is_help=True, help="Measures what methods cost.")

# Help lists commands in this order.
app.command()(catalogue.methods)
# Options end at the first word of the command, so that its own options need no "--".
app.command(context_settings={"allow_interspersed_args": False})(cluster.net)
app.command()(cluster.demo)
app.command()(forecast.simulate)
app.command()(study.study)
app.command()(forecast.advise)
app.command()(report.report)
app.add_typer(bench, name="bench")
bench.command()(bench_hosts.step)
bench.command()(bench_hosts.train)
bench.command()(bench_here.kernels)
bench.command()(bench_here.workloads)
bench.command()(bench_here.fuzz)
bench.command()(bench_hosts.guards)
bench.command()(bench_hosts.validate)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(VERSION)
        raise typer.Exit


@app.callback()
def laconic(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Prints it."),
    ] = False,
) -> None:
    """Distributed training that says the most in the fewest bytes."""


def run() -> None:
    """Runs the command line; an error that is the user's to mend is one line, not a traceback."""
    try:
        app()
    except LaconicError as error:
        print(f"laconic: {error}", file=sys.stderr)
        sys.exit(_USER_ERROR)
