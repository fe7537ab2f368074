"""`laconic study`: convergence of many methods, with workers in lock step."""

from typing import Annotated

import typer

from laconic.cli.options import Commit, Data, Device, Json, parse_seeds
from laconic.cli.terminal import command_line, leave, open_console
from laconic.errors import ConfigError


def study(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which; without, all are listed.")
    ] = None,
    json: Json = None,
    minutes: Annotated[float, typer.Option(help="No run goes on for longer than this.")] = 60,
    jobs: Annotated[int, typer.Option(help="Runs at a time, in a process each.")] = 1,
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
    """Runs convergence studies of simulated workers; goes on where an earlier call stopped."""
    from laconic.bench.study.studies import STUDIES, find_study

    if not names:
        for key, one in STUDIES.items():
            print(f"{key}: {one.shows} ({len(one.cases)} cases, {one.steps:,} steps)")
        return
    if json is None:
        raise ConfigError("study: give a file for the records with --json")
    from laconic.bench.study.bench import StudyBench
    from laconic.bench.study.run import Setting

    numbers = None if seeds is None else parse_seeds(seeds)
    chosen = tuple(find_study(name).changed(workload, steps, numbers, case) for name in names)
    setting = Setting(data, device, command_line(), commit)
    leave(StudyBench(chosen, setting, json, minutes, jobs).run(open_console()))
