"""The command line: reads arguments and prints; the work is done by the modules it calls."""

import sys
from typing import Annotated

import typer

from gradwire.cli import benchmarks, cluster, diagnosis, report, simulation
from gradwire.cli.output import with_quiet
from gradwire.errors import GradwireError
from gradwire.version import VERSION

_USER_ERROR = 2

app = typer.Typer(
    name="gradwire",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(no_args_is_help=True, help="Measures the cost of methods.")

# Help lists commands in this order.
app.command()(with_quiet(report.methods))
# Options end at the first word of the command, so that its own options need no "--".
app.command(context_settings={"allow_interspersed_args": False})(with_quiet(cluster.net))
# Likewise: the options of torchrun and of the script are theirs.
app.command(context_settings={"allow_interspersed_args": False})(with_quiet(diagnosis.doctor))
app.command()(with_quiet(cluster.demo))
app.command()(with_quiet(simulation.simulate))
app.command()(with_quiet(simulation.study))
app.command()(with_quiet(simulation.advise))
app.command()(with_quiet(report.report))
app.add_typer(bench, name="bench")
bench.command()(with_quiet(benchmarks.step))
bench.command()(with_quiet(benchmarks.train))
bench.command()(with_quiet(benchmarks.kernels))
bench.command()(with_quiet(benchmarks.workloads))
bench.command()(with_quiet(benchmarks.fuzz))
bench.command()(with_quiet(benchmarks.faults))
bench.command()(with_quiet(benchmarks.elastic))
bench.command()(with_quiet(benchmarks.guards))
bench.command()(with_quiet(benchmarks.pipeline))
bench.command()(with_quiet(benchmarks.integrations))
bench.command()(with_quiet(benchmarks.validate))


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
        app(prog_name="gradwire")
    except GradwireError as error:
        print(f"gradwire: {error}", file=sys.stderr)
        sys.exit(_USER_ERROR)
