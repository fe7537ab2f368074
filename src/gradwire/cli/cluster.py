"""Commands that run workers on emulated hosts: `gradwire net` and `gradwire demo`."""

from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.common import (
    INTERRUPTED,
    Json,
    Rate,
    Workers,
    command_line,
    exit_with,
    named_rate,
)
from gradwire.cli.output import open_console


def net(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The command that every worker runs.", show_default=False),
    ] = None,
    workers: Workers = 4,
    rate: Annotated[
        str | None,
        typer.Option(help="Rate of every link, up and down, such as 100mbit; default: unshaped."),
    ] = None,
) -> None:
    """Runs a command on emulated hosts with links of a given rate (Linux, root).

    Every worker has torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR ...) and a host of its
    own. The first exit code other than 0 ends the other workers and is returned.
    """
    from gradwire.testbed.cluster import run_on_testbed

    try:
        code = run_on_testbed(command or [], workers, rate)
    except KeyboardInterrupt:
        code = INTERRUPTED
    raise typer.Exit(code)


def demo(
    workers: Workers = 4,
    rate: Rate = "100mbit",
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 150,
    output: Annotated[Path, typer.Option(help="The report page.")] = Path("gradwire-report.html"),
    json: Json = None,
) -> None:
    """Compares dense and compressed training on emulated hosts with slow links (a few minutes).

    Without root, or without network namespaces, the links are not shaped.
    """
    from gradwire.bench.runs.demo import Demo

    bench = Demo(workers, named_rate(rate), steps, output, json, command_line())
    exit_with(bench.run(open_console(json)))
