"""The command line: reads arguments and prints; the work is done by the modules it calls."""

import sys
from typing import Annotated

import typer

from gradwire.cli import benchmarks, cluster, diagnosis, report, simulation
from gradwire.errors import GradwireError
from gradwire.version import VERSION

_USER_ERROR = 2

app = typer.Typer(
    name="gradwire",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(no_args_is_help=True, help="Measures the cost of methods.")

# Help lists commands in this order.
app.command()(report.methods)
# Options end at the first word of the command, so that its own options need no "--".
app.command(context_settings={"allow_interspersed_args": False})(cluster.net)
# Likewise: the options of torchrun and of the script are theirs.
app.command(context_settings={"allow_interspersed_args": False})(diagnosis.doctor)
app.command()(cluster.demo)
app.command()(simulation.simulate)
app.command()(simulation.study)
app.command()(simulation.advise)
app.command()(report.report)
app.add_typer(bench, name="bench")
bench.command()(benchmarks.step)
bench.command()(benchmarks.train)
bench.command()(benchmarks.kernels)
bench.command()(benchmarks.workloads)
bench.command()(benchmarks.fuzz)
bench.command()(benchmarks.faults)
bench.command()(benchmarks.guards)
bench.command()(benchmarks.integrations)
bench.command()(benchmarks.validate)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(VERSION)
        raise typer.Exit


@app.callback()
def gradwire(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Prints the version."
        ),
    ] = False,
) -> None:
    """Communication-efficient distributed training: compress, measure, compare."""


def run() -> None:
    """Runs the command line; a user error prints one line, not a traceback."""
    try:
        app()
    except GradwireError as error:
        print(f"gradwire: {error}", file=sys.stderr)
        sys.exit(_USER_ERROR)
