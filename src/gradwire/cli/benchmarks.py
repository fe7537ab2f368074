"""Commands of `gradwire bench`: in this process, or with workers on emulated hosts."""

from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.common import (
    Cases,
    Commit,
    Data,
    Device,
    Json,
    Rate,
    Specs,
    Workers,
    WorkloadText,
    command_line,
    exit_with,
    named_rate,
    parse_factors,
    parse_seeds,
    parse_sizes,
)
from gradwire.cli.output import open_console, write_rows


def kernels(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    sizes: Annotated[str, typer.Option(help="Numbers of elements, separated by commas.")] = "5.8e6",
    case: Annotated[
        list[str] | None,
        typer.Option("--specs", "--case", "--cases", help="Specs; repeat, or separate by commas."),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    seconds: Annotated[float, typer.Option(help="Time limit of a method at one size.")] = 30,
    json: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Writes the charts to this SVG file.")] = None,
    levels: Annotated[
        str | None,
        typer.Option(help="Measures selection at two factors (10,1000) instead."),
    ] = None,
    commit: Commit = None,
) -> None:
    """Measures encoding, decoding and a step with error feedback, relative to a memory copy."""
    from gradwire.bench.cases.parse import split_cases
    from gradwire.bench.microbench.kernels import KernelBench, usual_specs
    from gradwire.bench.microbench.two_level import SPECS, LevelsBench

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
        ).run(open_console(json))
        return
    specs = split_cases(case) if case else tuple(usual_specs())
    measure = KernelBench(
        device,
        parse_sizes("sizes", sizes),
        specs,
        threads,
        json,
        command_line(),
        plot,
        commit,
        seconds,
    )
    measure.run(open_console(json))


def workloads(
    json: Json = None,
) -> None:
    """Prints the workloads: model, parameters, data and metric of each."""
    from gradwire.bench.report import workload_table

    rows = workload_table.rows()
    if json is not None:
        write_rows(json, (row._asdict() for row in rows))
    else:
        open_console(json).print(workload_table.table(rows))


def fuzz(
    messages: Annotated[int, typer.Option(help="Hostile messages in all.")] = 100_000,
    seed: Annotated[int, typer.Option(help="The same seed sends the same messages.")] = 0,
    case: Specs = None,
    json: Json = None,
) -> None:
    """Sends hostile messages to every decoder; fails unless each is decoded or refused."""
    from gradwire.bench.cases.parse import split_cases
    from gradwire.bench.fuzz.run import Fuzz

    hostile = Fuzz(messages, seed, split_cases(case) if case else (), json, command_line())
    raise typer.Exit(0 if hostile.run(open_console(json)) else 1)


def faults(
    faults: Annotated[int, typer.Option(help="Faults in all.")] = 200,
    jobs: Annotated[
        str, typer.Option(help="Jobs among ddp, fsdp, local and async, separated by commas.")
    ] = "ddp,fsdp,local,async",
    seed: Annotated[int, typer.Option(help="The same seed draws the same faults.")] = 0,
    minutes: Annotated[float, typer.Option(help="Time limit of all jobs.")] = 60,
    json: Json = None,
) -> None:
    """Kills, stops and corrupts running jobs; fails if one hangs or loses a checkpoint.

    On four emulated hosts (Linux, root). About four seconds per fault.
    """
    from gradwire.bench.faults.campaign import FaultBench

    bench = FaultBench(faults, tuple(jobs.split(",")), seed, minutes, json, command_line())
    raise typer.Exit(0 if bench.run(open_console(json)) else 1)


def elastic(
    kills: Annotated[int, typer.Option(help="Kills in each run.")] = 20,
    case: Annotated[
        str,
        typer.Option(
            "--cases",
            help="Methods, separated by semicolons; torchft and torchft-ddp are its own means, "
            "diloco and sparseloco local methods.",
        ),
    ] = "torchft;none;topk:ratio=0.01;sparseloco",
    replicas: Annotated[int, typer.Option(help="Processes, each a replica.")] = 4,
    seed: Annotated[int, typer.Option(help="The same seed draws the same kills.")] = 0,
    minutes: Annotated[float, typer.Option(help="Time limit of all runs.")] = 40,
    json: Json = None,
) -> None:
    """Kills replicas of a torchft job, which join again; fails if it hangs or their bits differ.

    Needs the extra torchft. About six seconds per kill.
    """
    from gradwire.bench.elastic.soak import ElasticBench

    cases = tuple(part.strip() for part in case.split(";"))
    bench = ElasticBench(kills, cases, replicas, seed, minutes, json, command_line())
    raise typer.Exit(0 if bench.run(open_console(json)) else 1)


def step(
    workers: Workers = 4,
    rate: Rate = "1gbit",
    case: Cases = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each case, in three blocks.")] = 30,
    warmup: Annotated[
        int, typer.Option(help="Untimed steps before each block; of local methods, syncs.")
    ] = 3,
    minutes: Annotated[
        float, typer.Option(help="Time for the steps of all cases; slow cases take fewer.")
    ] = 4,
    batch: Annotated[
        int | None, typer.Option(help="Examples per worker; default: that of the workload.")
    ] = None,
    workload: WorkloadText = "mlp",
    data: Data = None,
    device: Device = "cpu",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measures step times and bytes of methods, by default on an MLP of 5.8 million parameters."""
    from gradwire.bench.cases.parse import split_cases
    from gradwire.bench.runs.step import CASES, StepBench

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
        60 * minutes,
    )
    exit_with(measure.run(open_console(json)))


def train(
    workload: WorkloadText = "charlm",
    data: Data = None,
    device: Device = "cpu",
    workers: Workers = 4,
    rate: Rate = "1gbit",
    case: Cases = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each run.")] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the data, instead of --steps.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Numbers, separated by commas.")] = "0",
    warmup: Annotated[int, typer.Option(help="Steps before each run, with another model.")] = 3,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Steps between two evaluations; default: 20 in all.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Target of a run, such as accuracy=0.9 or loss=2.5.")
    ] = None,
    again: Annotated[
        bool, typer.Option(help="Repeats runs that the file contains already.")
    ] = False,
    json: Json = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A report page.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Writes runs as they go, for TensorBoard.")
    ] = None,
    commit: Commit = None,
) -> None:
    """Trains a workload with every case and seed; resumes an interrupted call."""
    from gradwire.bench.cases.parse import split_cases
    from gradwire.bench.runs.train import CASES, TrainBench

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
    exit_with(measure.run(open_console(json)))


def guards(
    workers: Workers = 4,
    rate: Rate = "1gbit",
    case: Specs = None,
    rounds: Annotated[int, typer.Option(help="Rounds with and without each guard.")] = 20,
    steps: Annotated[int, typer.Option(help="Timed steps of each case in each round.")] = 5,
    warmup: Annotated[int, typer.Option(help="Untimed steps before them.")] = 2,
    workload: WorkloadText = "mlp",
    json: Json = None,
) -> None:
    """Measures the cost of guards: alternates steps with and without each, and takes the ratio."""
    from gradwire.bench.cases.parse import split_cases
    from gradwire.bench.runs.guards import CASES, GuardBench

    cases, command = split_cases(case or CASES), command_line()
    measure = GuardBench(
        cases, workers, named_rate(rate), rounds, steps, warmup, workload, json, command
    )
    measure.run(open_console(json))


def pipeline(
    workload: WorkloadText = "gpt:layers=4,heads=4,width=128,context=64,learning_rate=0.002",
    stages: Annotated[int, typer.Option(help="Stages of the model.")] = 2,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 4,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case", "--cases", help="Methods as 'ACTIVATIONS / GRADIENTS'; repeat for more."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 500,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    data: Data = None,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Compares losses of a model whose stages send compressed activations and gradients.

    All stages run in this process. The GPT of 31 million parameters is
    --workload gpt:layers=10,heads=8,width=512 --device cuda.
    """
    from gradwire.bench.runs.pipeline import CASES, PipelineBench

    PipelineBench(
        workload,
        device,
        stages,
        microbatches,
        tuple(case or CASES),
        steps,
        parse_seeds(seeds),
        json,
        command_line(),
        data,
    ).run(open_console(json))


def integrations(
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 2,
    steps: Annotated[int, typer.Option(help="Timed steps of each kind.")] = 200,
    width: Annotated[int | None, typer.Option(help="Width of the two layers.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Integration, instead of all; repeat for more.")
    ] = None,
    trainers: Annotated[
        bool, typer.Option(help="Also inside Accelerate, Lightning and Transformers (minutes).")
    ] = False,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Compares `none` through DDP, FSDP2, loop and optimisers with the same steps without it."""
    from gradwire.bench.microbench.integrations import PAIRS, WIDTH, IntegrationBench, show
    from gradwire.bench.records.files import append, check_writable

    names, command = tuple(only or PAIRS), command_line()
    measure = IntegrationBench(ranks, steps, width or WIDTH, names, device, trainers, command)
    if json is not None:
        check_writable(json)
    records = measure.run()
    if json is not None:
        for record in records:
            append(json, record)
    show(records, open_console(json))


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
    from gradwire.bench.cases.parse import split_cases
    from gradwire.bench.predictions import validation

    validation.Validation(
        split_cases(case or validation.CASES),
        tuple(named_rate(rate) for rate in rates.split(",")),
        parse_sizes("workers", workers),
        steps,
        json,
        command_line(),
        commit=commit,
    ).run(open_console(json))
