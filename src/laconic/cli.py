"""The command line: reads arguments and prints; the work is done by the modules it calls."""

from __future__ import annotations

import shlex
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.errors import ConfigError, LaconicError

if TYPE_CHECKING:
    from rich.console import Console

    from laconic.bench.simulate_bench import Links

_USER_ERROR = 2
_INTERRUPTED = 130
_FILE_COLUMNS = 120

app = typer.Typer(
    name="laconic",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(no_args_is_help=True, help="Measures what methods cost.")
app.add_typer(bench, name="bench")

Workers = Annotated[int, typer.Option(help="Emulated hosts, one worker on each.")]
Rate = Annotated[str, typer.Option(help="Rate of every link, such as 100mbit; none: unshaped.")]
Json = Annotated[
    Path | None, typer.Option("--json", help="Adds the records to this file, as JSON lines.")
]
Latency = Annotated[str, typer.Option(help="Latency of a hop, such as 0.1ms.")]
Cases = Annotated[
    list[str] | None,
    typer.Option("--case", "--cases", help="Specs or baselines; repeat, or separate by commas."),
]
WorkloadText = Annotated[
    str, typer.Option("--workload", help="NAME[:key=value,...] of `laconic bench workloads`.")
]
Data = Annotated[Path | None, typer.Option(help="The folder of its data set.")]
Device = Annotated[str, typer.Option(help="cpu or cuda; workers may share one GPU.")]
Commit = Annotated[
    str | None, typer.Option(help="The commit for the records, where there is no checkout.")
]


def run() -> None:
    """Runs the command line; an error that is the user's to mend is one line, not a traceback."""
    try:
        app()
    except LaconicError as error:
        print(f"laconic: {error}", file=sys.stderr)
        sys.exit(_USER_ERROR)


@app.callback()
def laconic() -> None:
    """Distributed training that says the most in the fewest bytes."""


@app.command()
def methods(
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    markdown: Annotated[
        Path | None, typer.Option(help="Writes the table between the marks of this file.")
    ] = None,
) -> None:
    """Prints the catalogue: bits an element, default memory and exchange, and the paper."""
    from laconic import catalogue

    if markdown is not None:
        catalogue.write_into(markdown)
    elif json:
        for row in catalogue.rows():
            print(dumps(catalogue.as_dict(row)))
    else:
        from laconic.bench.methods_table import methods_table

        _console().print(methods_table(catalogue.rows()))


# Options end at the first word of the command, so that its own options need no "--".
@app.command(context_settings={"allow_interspersed_args": False})
def net(
    command: Annotated[
        list[str] | None, typer.Argument(help="What every worker runs.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(help="Emulated hosts, one worker on each.")] = 4,
    rate: Annotated[
        str | None,
        typer.Option(help="Rate of every link, up and down, such as 100mbit; else unshaped."),
    ] = None,
) -> None:
    """Runs a command on emulated hosts with links of a given rate (Linux, root).

    Every worker has torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR ...) and a host of its
    own. The first exit code that is not 0 is passed on, and ends the other workers.
    """
    from laconic.network.cluster import run_on_testbed

    try:
        code = run_on_testbed(command or [], workers, rate)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    raise typer.Exit(code)


@app.command()
def demo(
    workers: Workers = 4,
    rate: Rate = "100mbit",
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 150,
    output: Annotated[Path, typer.Option(help="The report page.")] = Path("laconic-report.html"),
    json: Json = None,
) -> None:
    """Races dense and compressed training on emulated hosts with slow links (a few minutes).

    Without root, or where there are no network namespaces, the links are not shaped.
    """
    from laconic.bench.demo import Demo

    race = Demo(workers, _rate(rate), steps, output, json, _command())
    _exit(finished=race.run(_console()))


@bench.command("step")
def bench_step(
    workers: Workers = 4,
    rate: Rate = "1gbit",
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case", "--cases", help="Specs or baselines; repeat, or separate by commas."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each case, in three blocks.")] = 30,
    warmup: Annotated[int, typer.Option(help="Untimed steps before each block.")] = 3,
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
    from laconic.bench import step_bench
    from laconic.bench.cases import split_cases

    cases = split_cases(case or step_bench.CASES)
    measure = step_bench.StepBench(
        cases,
        workers,
        _rate(rate),
        steps,
        warmup,
        batch,
        json,
        _command(),
        workload,
        data,
        device,
        commit,
    )
    _exit(finished=measure.run(_console()))


@bench.command("train")
def bench_train(
    workload: WorkloadText = "charlm",
    data: Data = None,
    device: Device = "cpu",
    workers: Workers = 4,
    rate: Rate = "1gbit",
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case", "--cases", help="Specs or baselines; repeat, or separate by commas."
        ),
    ] = None,
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
    from laconic.bench import train_bench
    from laconic.bench.cases import split_cases

    measure = train_bench.TrainBench(
        workload=workload,
        data=data,
        device=device,
        workers=workers,
        rate=_rate(rate),
        cases=split_cases(case or train_bench.CASES),
        steps=steps,
        epochs=epochs,
        seeds=_seeds(seeds),
        warmup=warmup,
        evaluate_every=evaluate_every,
        target=target,
        again=again,
        json_path=json,
        output=output,
        tensorboard=tensorboard,
        command=_command(),
        commit=commit,
    )
    _exit(finished=measure.run(_console()))


@bench.command("kernels")
def bench_kernels(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    sizes: Annotated[str, typer.Option(help="Numbers of elements, separated by commas.")] = "5.8e6",
    case: Annotated[
        list[str] | None,
        typer.Option("--specs", "--case", "--cases", help="Specs; repeat, or separate by commas."),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    json: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Writes the charts to this SVG file.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="The commit for the records, where there is no checkout.")
    ] = None,
) -> None:
    """Measures encoding, decoding and a step with error feedback, beside the floor of a copy."""
    from laconic.bench.cases import split_cases
    from laconic.bench.kernel_bench import KernelBench, usual_specs

    specs = split_cases(case) if case else tuple(usual_specs())
    measure = KernelBench(device, _sizes(sizes), specs, threads, json, _command(), plot, commit)
    measure.run(_console())


@bench.command("workloads")
def bench_workloads(
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Prints what can be trained: the model, its parameters, its data and its metric."""
    from laconic.bench import workloads_table

    rows = workloads_table.rows()
    if json:
        for row in rows:
            print(dumps(row._asdict()))
    else:
        _console().print(workloads_table.table(rows))


@bench.command("fuzz")
def bench_fuzz(
    messages: Annotated[int, typer.Option(help="Hostile messages in all.")] = 100_000,
    seed: Annotated[int, typer.Option(help="The same seed sends the same messages.")] = 0,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", "--cases", help="Specs; repeat, or separate by commas."),
    ] = None,
    json: Json = None,
) -> None:
    """Sends hostile and broken messages to every decoder; fails unless each is read or refused."""
    from laconic.bench.cases import split_cases
    from laconic.bench.fuzz.run import Fuzz

    fuzz = Fuzz(messages, seed, split_cases(case) if case else (), json, _command())
    raise typer.Exit(0 if fuzz.run(_console()) else 1)


@bench.command("guards")
def bench_guards(
    workers: Workers = 4,
    rate: Rate = "1gbit",
    case: Annotated[
        list[str] | None,
        typer.Option("--case", "--cases", help="Specs; repeat, or separate by commas."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds with and without each guard.")] = 20,
    steps: Annotated[int, typer.Option(help="Timed steps of each case in each round.")] = 5,
    warmup: Annotated[int, typer.Option(help="Untimed steps before those.")] = 2,
    workload: WorkloadText = "mlp",
    json: Json = None,
) -> None:
    """Measures what guards cost: steps with and without each of them, in turns, and their ratio."""
    from laconic.bench.cases import split_cases
    from laconic.bench.guards import CASES, GuardBench

    cases, command = split_cases(case or CASES), _command()
    measure = GuardBench(
        cases, workers, _rate(rate), rounds, steps, warmup, workload, json, command
    )
    measure.run(_console())


@bench.command("validate")
def bench_validate(
    workers: Annotated[str, typer.Option(help="Numbers of hosts, separated by commas.")] = "2,4,8",
    rates: Annotated[
        str, typer.Option(help="Rates, separated by commas.")
    ] = "100mbit,1gbit,10gbit",
    case: Cases = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each case, in each of 5 blocks.")] = 4,
    json: Json = None,
) -> None:
    """Compares predicted step times with measured ones on emulated hosts (minutes; Linux, root)."""
    from laconic.bench import validation
    from laconic.bench.cases import split_cases

    validation.Validation(
        split_cases(case or validation.CASES),
        tuple(_rate(rate) for rate in rates.split(",")),
        _sizes(workers),
        steps,
        json,
        _command(),
    ).run(_console())


@app.command()
def simulate(
    workload: Annotated[str, typer.Option(help="Such as mlp or resnet18-tiny.")] = "mlp",
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "8",
    rate: Annotated[str, typer.Option(help="Rate of every link, such as 1gbit.")] = "1gbit",
    latency: Latency = "0.1ms",
    inside: Annotated[str | None, typer.Option(help="Rate of links inside nodes.")] = None,
    case: Cases = None,
    steps: Annotated[int | None, typer.Option(help="Trains for so many steps.")] = None,
    evaluate_every: Annotated[int, typer.Option(help="Steps between two evaluations.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the model and the batches.")] = 0,
    data: Data = None,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Predicts the step time and the bytes of any number of workers, or trains them in lock step.

    With --steps the workers train in this process; bytes are exact and times are predicted.
    """
    from laconic.bench.cases import split_cases
    from laconic.bench.device import check_device
    from laconic.bench.simulate_bench import CASES, SimulateBench
    from laconic.bench.simulated_train import SimulatedTrain
    from laconic.bench.workload import parse_workload

    check_device(device)
    bench = SimulateBench(
        parse_workload(workload, data, device),
        split_cases(case or CASES),
        _sizes(workers),
        _links(rate, latency, inside),
        json,
        _command(),
    )
    if steps is None:
        bench.run(_console())
    else:
        SimulatedTrain(bench, steps, evaluate_every, seed).run(_console())


@app.command()
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
        workload, steps, None if seeds is None else _seeds(seeds), case
    )
    bench = StudyBench(chosen, data, device, json, minutes, _command(), commit)
    _exit(finished=bench.run(_console()))


@app.command()
def advise(
    model: Annotated[
        str | None, typer.Option(help="module:function that returns a model, or (model, loss).")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--input", help="Shape of a batch for a model, such as 32x784.")
    ] = None,
    workload: Annotated[str | None, typer.Option(help="One of the bench's own instead.")] = None,
    workers: Annotated[int, typer.Option(help="Workers, each on a machine of its own.")] = 8,
    rate: Annotated[str | None, typer.Option(help="Rate of every link, such as 1gbit.")] = None,
    latency: Latency = "0.1ms",
    case: Cases = None,
    data: Data = None,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Says whether compression pays for a model on a network, and which method."""
    from laconic.bench.advise_bench import advise_on, write_advice
    from laconic.bench.cases import split_cases
    from laconic.bench.device import check_device
    from laconic.bench.forecasts import measure_workload
    from laconic.bench.named_model import measure_named
    from laconic.bench.workload import parse_workload
    from laconic.forecast.advice import SPECS

    if rate is None:
        raise ConfigError(
            "advise: give the links' --rate such as 1gbit, or let laconic.advise(ddp_model, loss) "
            "probe them in a running job"
        )
    if (model is None) == (workload is None):
        raise ConfigError("advise: give either --model module:function or --workload NAME")
    check_device(device)
    links, cases = _links(rate, latency, None), split_cases(case or SPECS)
    if model is not None:
        subject = measure_named(model, shape, device)
    else:
        subject = measure_workload(parse_workload(workload or "", data, device))
    found = advise_on(subject, cases, workers, links)
    print(found)
    if json is not None:
        write_advice(json, subject, workers, links, found, _command())


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Files of records, as --json writes them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    plots: Annotated[
        Path | None, typer.Option(help="Also draws every plot there, as PNG and SVG.")
    ] = None,
) -> None:
    """Writes one self-contained page about any number of runs."""
    from laconic.bench.records import read
    from laconic.bench.report import write_report

    records = read(runs)
    write_report(records, output)
    print(output)
    if plots is not None:
        from laconic.bench.figures import write_figures

        for path in write_figures(records, plots):
            print(path)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(float(word)) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"sizes: expected numbers such as 1e6,1e8, got {text!r}") from None
    if any(size < 1 for size in sizes):
        raise ConfigError(f"sizes: must be at least 1, got {text!r}")
    return sizes


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"seeds: expected numbers such as 0,1,2, got {text!r}") from None


def _links(rate: str, latency: str, inside: str | None) -> Links:
    from laconic.bench.simulate_bench import Links
    from laconic.network.latency import parse_latency
    from laconic.network.rate import parse_rate

    inside_bits = None if inside is None else parse_rate(inside)
    return Links(parse_rate(rate), parse_latency(latency), inside_bits)


def _rate(text: str) -> str | None:
    return None if text == "none" else text


def _console() -> Console:
    """The terminal as it is; a file or a pipe gets lines that are long enough for the tables."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_FILE_COLUMNS)


def _command() -> str:
    """How we were called, for the records."""
    return shlex.join(["laconic", *sys.argv[1:]])


def _exit(finished: bool) -> None:
    raise typer.Exit(0 if finished else _INTERRUPTED)
