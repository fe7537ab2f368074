"""Commands that run workers on emulated hosts: `gradwire net` and `gradwire demo`."""

from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.common import (
    INTERRUPTED,
    Json,
    LinksFile,
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
    up: Annotated[str | None, typer.Option(help="Rate from a worker, if it differs.")] = None,
    down: Annotated[str | None, typer.Option(help="Rate to a worker, if it differs.")] = None,
    delay: Annotated[str | None, typer.Option(help="Delay of what is sent, such as 20ms.")] = None,
    jitter: Annotated[str | None, typer.Option(help="Variation of the delay.")] = None,
    loss: Annotated[str | None, typer.Option(help="Lost packets, such as 0.1%.")] = None,
    links: LinksFile = None,
) -> None:
    """Runs a command on emulated hosts with links of a given rate (Linux, root).

    Delay, jitter and loss need a kernel with netem. A file of --links has unlike links by worker,
    islands, and links that change (docs/how-to/testbed.md); options replace its common settings.

    Every worker has torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR ...) and a host of its
    own. The first exit code other than 0 ends the other workers and is returned.
    """
    from gradwire.testbed.cluster import run_on_testbed
    from gradwire.testbed.links import plan_network

    given = {"rate": rate, "up": up, "down": down, "delay": delay, "jitter": jitter, "loss": loss}
    options = {key: value for key, value in given.items() if value is not None}
    plan = plan_network(workers, options, links)
    try:
        code = run_on_testbed(command or [], plan)
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
