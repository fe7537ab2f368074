"""Benchmarks of `laconic bench` whose workers have emulated hosts of their own."""

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.options import (
    Cases,
    Commit,
    Data,
    Device,
    Json,
    Rate,
    Specs,
    Workers,
    WorkloadText,
    named_rate,
    parse_seeds,
    parse_sizes,
)
from laconic.cli.terminal import command_line, leave, open_console


def step(
    workers: Workers = 4,
    rate: Rate = "1gbit",
    case: Cases = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each case, in three blocks.")] = 30,
    warmup: Annotated[
        int, typer.Option(help="Untimed steps before each block; of local methods, syncs.")
    ] = 3,
    batch: Annotated[
        int | None, typer.Option(help="Examples per worker; else the workload's own number.")
    ] = None,
    workload: WorkloadText = "mlp",
    data: Data = None,
    device: Device = "cpu",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measures step times and bytes of methods, by default on an MLP of 5.8 million parameters."""
    from laconic.bench.cases.parse import split_cases
    from laconic.bench.races.step import CASES, StepBench

    cases = split_cases(case or CASES)
    measure = StepBench(
        cases,
        workers,
        named_rate(rate),
        steps,
        warmup,
        batch,
        json,
        command_line(),
        workload,
        data,
        device,
        commit,
    )
    leave(measure.run(open_console()))


def train(
    workload: WorkloadText = "charlm",
    data: Data = None,
    device: Device = "cpu",
    workers: Workers = 4,
    rate: Rate = "1gbit",
    case: Cases = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each run.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Instead: passes over the data.")] = None,
    seeds: Annotated[str, typer.Option(help="Numbers, separated by commas.")] = "0",
    warmup: Annotated[int, typer.Option(help="Steps before each run, with another model.")] = 3,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Steps between two evaluations; else there are 20.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="What a run should reach: accuracy=0.9, loss=2.5 or so.")
    ] = None,
    again: Annotated[bool, typer.Option(help="Repeats runs that the file has already.")] = False,
    json: Json = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A report page.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Writes runs as they go, for TensorBoard.")
    ] = None,
    commit: Commit = None,
) -> None:
    """Trains a workload with every case and seed; goes on where an earlier call was interrupted."""
    from laconic.bench.cases.parse import split_cases
    from laconic.bench.races.train import CASES, TrainBench

    measure = TrainBench(
        workload=workload,
        data=data,
        device=device,
        workers=workers,
        rate=named_rate(rate),
        cases=split_cases(case or CASES),
        steps=steps,
        epochs=epochs,
        seeds=parse_seeds(seeds),
        warmup=warmup,
        evaluate_every=evaluate_every,
        target=target,
        again=again,
        json_path=json,
        output=output,
        tensorboard=tensorboard,
        command=command_line(),
        commit=commit,
    )
    leave(measure.run(open_console()))


def guards(
    workers: Workers = 4,
    rate: Rate = "1gbit",
    case: Specs = None,
    rounds: Annotated[int, typer.Option(help="Rounds with and without each guard.")] = 20,
    steps: Annotated[int, typer.Option(help="Timed steps of each case in each round.")] = 5,
    warmup: Annotated[int, typer.Option(help="Untimed steps before those.")] = 2,
    workload: WorkloadText = "mlp",
    json: Json = None,
) -> None:
    """Measures what guards cost: steps with and without each of them, in turns, and their ratio."""
    from laconic.bench.cases.parse import split_cases
    from laconic.bench.races.guards import CASES, GuardBench

    cases, command = split_cases(case or CASES), command_line()
    measure = GuardBench(
        cases, workers, named_rate(rate), rounds, steps, warmup, workload, json, command
    )
    measure.run(open_console())


def validate(
    workers: Annotated[str, typer.Option(help="Numbers of hosts, separated by commas.")] = "2,4,8",
    rates: Annotated[
        str, typer.Option(help="Rates, separated by commas.")
    ] = "100mbit,1gbit,10gbit",
    case: Cases = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each case, in each of 5 blocks.")] = 4,
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Compares predicted step times with measured ones on emulated hosts (minutes; Linux, root)."""
    from laconic.bench.cases.parse import split_cases
    from laconic.bench.forecast import validation

    validation.Validation(
        split_cases(case or validation.CASES),
        tuple(named_rate(rate) for rate in rates.split(",")),
        parse_sizes("workers", workers),
        steps,
        json,
        command_line(),
        commit=commit,
    ).run(open_console())
