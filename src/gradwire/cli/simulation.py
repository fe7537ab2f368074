"""Commands that simulate or predict: `gradwire simulate`, `advise` and `study`."""

from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.common import (
    Cases,
    Commit,
    Data,
    Device,
    Json,
    Latency,
    LinksFile,
    command_line,
    exit_with,
    parse_links,
    parse_seeds,
    parse_sizes,
)
from gradwire.cli.output import open_console, show
from gradwire.errors import ConfigError


def simulate(
    workload: Annotated[str, typer.Option(help="Such as mlp or resnet18-tiny.")] = "mlp",
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "8",
    rate: Annotated[str, typer.Option(help="Rate of every link, such as 1gbit.")] = "1gbit",
    latency: Latency = "0.1ms",
    inside: Annotated[str | None, typer.Option(help="Rate of links inside nodes.")] = None,
    links: LinksFile = None,
    case: Cases = None,
    topology: Annotated[
        str | None,
        typer.Option(help="Neighbors exchange messages over this graph: ring, torus, exponential."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Trains for this number of steps.")] = None,
    evaluate_every: Annotated[int, typer.Option(help="Steps between two evaluations.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the model and the batches.")] = 0,
    data: Data = None,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Predicts the step time and the bytes of any number of workers, or trains them in lock step.

    With --steps the workers train in this process; bytes are exact and times are predicted. A file
    of --links, as `gradwire net` takes it, replaces rate, latency and inside. With --topology every
    method is the compressor of CHOCO-SGD, whose messages go to neighbors alone.
    """
    from gradwire.bench.cases.parse import split_cases
    from gradwire.bench.machine import check_device
    from gradwire.bench.predictions import neighbors
    from gradwire.bench.predictions.simulate import CASES, SimulateBench, links_of
    from gradwire.bench.simulated.train import SimulatedTrain
    from gradwire.bench.workloads.base import parse_workload
    from gradwire.testbed.links import plan_network

    if topology is not None and steps is not None:
        raise ConfigError(
            "simulate: with --steps a topology is part of a case, such as "
            "'topk:ratio=0.1 @ local=(choco:topology=ring,gamma=0.3)' of gradwire study"
        )
    check_device(device)
    sizes = parse_sizes("workers", workers)
    network = parse_links(rate, latency, inside)
    if links is not None:
        network = links_of(plan_network(max(sizes), {}, links))
    bench = SimulateBench(
        parse_workload(workload, data, device),
        split_cases(case or (CASES if topology is None else neighbors.CASES)),
        sizes,
        network,
        json,
        command_line(),
        topology,
    )
    if steps is None:
        bench.run(open_console(json))
    else:
        SimulatedTrain(bench, steps, evaluate_every, seed).run(open_console(json))


def advise(
    model: Annotated[
        str | None, typer.Option(help="module:function that returns a model, or (model, loss).")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--input", help="Shape of a batch for a model, such as 32x784.")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="A workload of `gradwire bench workloads`, instead of --model."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="Class of torch.optim that trains --model, such as sgd or adamw."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Number of workers, one per machine.")] = 8,
    rate: Annotated[str | None, typer.Option(help="Rate of every link, such as 1gbit.")] = None,
    latency: Latency = "0.1ms",
    case: Cases = None,
    data: Data = None,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Predicts whether compression pays for a model on a network, and recommends a method."""
    from gradwire.bench.cases.parse import split_cases
    from gradwire.bench.machine import check_device
    from gradwire.bench.predictions.advise import advise_on, measure_named, write_advice
    from gradwire.bench.predictions.measured_model import measure_workload
    from gradwire.bench.records.files import check_writable
    from gradwire.bench.workloads.base import parse_workload
    from gradwire.perfmodel.advise import SPECS, STEPS

    if rate is None:
        raise ConfigError(
            "advise: give the links' --rate such as 1gbit, or let "
            "gradwire.advise(ddp_model, loss, optimizer) probe them in a running job"
        )
    if (model is None) == (workload is None):
        raise ConfigError("advise: give either --model module:function or --workload NAME")
    if (model is None) != (optimizer is None):
        raise ConfigError(
            "advise: give --optimizer such as sgd or adamw with --model, and only there: the risk "
            "of a method depends on it, and a workload has its own"
        )
    check_device(device)
    links, cases = parse_links(rate, latency, None), split_cases(case or SPECS)
    if json is not None:
        check_writable(json)
    if model is not None and optimizer is not None:
        measured = measure_named(model, shape, device, optimizer)
    else:
        measured = measure_workload(parse_workload(workload or "", data, device), steps=STEPS)
    advice = advise_on(measured, cases, workers, links)
    show(advice, json)
    if json is not None:
        write_advice(json, measured, workers, links, advice, command_line())


def study(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of studies, such as cifar10, grace (all grace-...) or 'gravac*'; without "
            "any, all are listed."
        ),
    ] = None,
    json: Json = None,
    minutes: Annotated[float, typer.Option(help="Time limit of all runs.")] = 60,
    jobs: Annotated[int, typer.Option(help="Runs at a time, each in its own process.")] = 1,
    seeds: Annotated[str | None, typer.Option(help="Seeds, instead of the study's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of the study's.")] = None,
    workload: Annotated[str | None, typer.Option(help="Workload, instead of the study's.")] = None,
    workers: Annotated[int | None, typer.Option(help="Workers, instead of the study's.")] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Case, instead of the study's; repeat for more.")
    ] = None,
    data: Data = None,
    device: Device = "cpu",
    commit: Commit = None,
    page: Annotated[
        Path | None, typer.Option(help="Writes an HTML page of all records of --json at the end.")
    ] = None,
    smoke: Annotated[
        bool, typer.Option(help="Takes a few steps of tiny models on the CPU; keeps no records.")
    ] = False,
) -> None:
    """Runs convergence studies of simulated workers; resumes an earlier call."""
    from gradwire.bench.studies.definitions import STUDIES, find_studies

    if not names:
        for key, one in STUDIES.items():
            show(f"{key}: {one.summary} ({len(one.cases)} cases, {one.steps:,} steps)")
        return
    if smoke:
        if json is not None or page is not None or device != "cpu":
            raise ConfigError(
                "study: --smoke keeps no records and runs on the CPU; omit --json, --page and "
                "--device"
            )
        _smoke(names, minutes)
        return
    if json is None:
        raise ConfigError("study: give a file for the records with --json")
    if str(json) == "-":
        raise ConfigError("study: --json must be a file, got -: a study resumes from its records")
    from gradwire.bench.studies.bench import StudyBench
    from gradwire.bench.studies.run import CommandSettings

    numbers = None if seeds is None else parse_seeds(seeds)
    chosen = tuple(
        form
        for name in names
        for one in find_studies(name).values()
        for length in one.with_changes(workload, steps, numbers, case, workers).by_length()
        for form in length.by_learning_rate()
    )
    setting = CommandSettings(data, device, command_line(), commit)
    bench = StudyBench(chosen, setting, json, minutes, jobs, page)
    exit_with(bench.run(open_console(json)))


def _smoke(names: list[str], minutes: float) -> None:
    """Runs the smoke form of studies with records in a temporary folder.

    A case that several of them have is run in the first one only.
    """
    from tempfile import TemporaryDirectory

    from gradwire.bench.studies.bench import StudyBench
    from gradwire.bench.studies.definitions import find_studies
    from gradwire.bench.studies.run import CommandSettings
    from gradwire.bench.studies.study import distinct_cases

    studies = {key: one for name in names for key, one in find_studies(name).items()}
    chosen = distinct_cases([one.smoke() for one in studies.values()])
    setting = CommandSettings(None, "cpu", command_line(), None)
    with TemporaryDirectory() as folder:
        bench = StudyBench(chosen, setting, Path(folder) / "smoke.jsonl", minutes)
        exit_with(bench.run(open_console()))
