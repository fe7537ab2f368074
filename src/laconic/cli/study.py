"""`laconic study`: convergence of many methods, with workers in lock step."""

from typing import Annotated

import typer

from laconic.cli.options import Commit, Data, Device, Json, parse_seeds
from laconic.cli.terminal import command_line, leave, open_console
from laconic.errors import ConfigError


def study(
    name: Annotated[str | None, typer.Argument(help="Which; without, they are listed.")] = None,
    json: Json = None,
    minutes: Annotated[float, typer.Option(help="No run goes on for longer than this.")] = 60,
    seeds: Annotated[str | None, typer.Option(help="Instead of the study's own.")] = None,
    steps: Annotated[int | None, typer.Option(help="Instead of the study's own.")] = None,
    workload: Annotated[str | None, typer.Option(help="Instead of the study's own.")] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Instead of the study's own; repeat for more.")
    ] = None,
    data: Data = None,
    device: Device = "cpu",
    commit: Commit = None,
) -> None:
    """Runs a convergence study of simulated workers; goes on where an earlier call stopped."""
    from laconic.bench.studies import STUDIES, find_study

    if name is None:
        for key, one in STUDIES.items():
            print(f"{key}: {one.shows} ({len(one.cases)} cases, {one.steps:,} steps)")
        return
    if json is None:
        raise ConfigError("study: give a file for the records with --json")
    from laconic.bench.study_bench import StudyBench

    chosen = find_study(name).changed(
        workload, steps, None if seeds is None else parse_seeds(seeds), case
    )
    bench = StudyBench(chosen, data, device, json, minutes, command_line(), commit)
    leave(finished=bench.run(open_console()))
