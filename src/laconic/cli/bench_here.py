"""Commands of `laconic bench` that need one process: kernels, decoders, and a list."""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.options import Commit, Json, Specs, parse_factors, parse_sizes
from laconic.cli.terminal import command_line, open_console


def kernels(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    sizes: Annotated[str, typer.Option(help="Numbers of elements, separated by commas.")] = "5.8e6",
    case: Annotated[
        list[str] | None,
        typer.Option("--specs", "--case", "--cases", help="Specs; repeat, or separate by commas."),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    json: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Writes the charts to this SVG file.")] = None,
    levels: Annotated[
        str | None,
        typer.Option(help="Instead: choosing at two factors (10,1000), in levels and twice."),
    ] = None,
    commit: Commit = None,
) -> None:
    """Measures encoding, decoding and a step with error feedback, beside the floor of a copy."""
    from laconic.bench.cases.parse import split_cases
    from laconic.bench.costs.kernels import KernelBench, usual_specs
    from laconic.bench.costs.two_levels import SPECS, LevelsBench

    if levels is not None:
        LevelsBench(
            parse_factors(levels),
            device,
            parse_sizes("sizes", sizes),
            split_cases(case) if case else SPECS,
            threads,
            json,
            command_line(),
            commit,
        ).run(open_console())
        return
    specs = split_cases(case) if case else tuple(usual_specs())
    measure = KernelBench(
        device, parse_sizes("sizes", sizes), specs, threads, json, command_line(), plot, commit
    )
    measure.run(open_console())


def workloads(
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Prints what can be trained: the model, its parameters, its data and its metric."""
    from laconic.bench.work import table

    rows = table.rows()
    if json:
        for row in rows:
            print(dumps(row._asdict()))
    else:
        open_console().print(table.table(rows))


def fuzz(
    messages: Annotated[int, typer.Option(help="Hostile messages in all.")] = 100_000,
    seed: Annotated[int, typer.Option(help="The same seed sends the same messages.")] = 0,
    case: Specs = None,
    json: Json = None,
) -> None:
    """Sends hostile and broken messages to every decoder; fails unless each is read or refused."""
    from laconic.bench.cases.parse import split_cases
    from laconic.bench.fuzz.run import Fuzz

    hostile = Fuzz(messages, seed, split_cases(case) if case else (), json, command_line())
    raise typer.Exit(0 if hostile.run(open_console()) else 1)
