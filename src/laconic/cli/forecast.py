"""Commands that predict: `laconic simulate` and `laconic advise`."""

from typing import Annotated

import typer

from laconic.cli.options import Cases, Data, Device, Json, Latency, parse_links, parse_sizes
from laconic.cli.terminal import command_line, open_console
from laconic.errors import ConfigError


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
    from laconic.bench.cases.parse import split_cases
    from laconic.bench.device import check_device
    from laconic.bench.forecast.simulate import CASES, SimulateBench
    from laconic.bench.lockstep.train import SimulatedTrain
    from laconic.bench.work.workload import parse_workload

    check_device(device)
    bench = SimulateBench(
        parse_workload(workload, data, device),
        split_cases(case or CASES),
        parse_sizes("workers", workers),
        parse_links(rate, latency, inside),
        json,
        command_line(),
    )
    if steps is None:
        bench.run(open_console())
    else:
        SimulatedTrain(bench, steps, evaluate_every, seed).run(open_console())


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
    from laconic.bench.cases.parse import split_cases
    from laconic.bench.device import check_device
    from laconic.bench.forecast.advise import advise_on, write_advice
    from laconic.bench.forecast.named_model import measure_named
    from laconic.bench.forecast.subject import measure_workload
    from laconic.bench.records.files import check_writable
    from laconic.bench.work.workload import parse_workload
    from laconic.forecast.advice import SPECS

    if rate is None:
        raise ConfigError(
            "advise: give the links' --rate such as 1gbit, or let laconic.advise(ddp_model, loss) "
            "probe them in a running job"
        )
    if (model is None) == (workload is None):
        raise ConfigError("advise: give either --model module:function or --workload NAME")
    check_device(device)
    links, cases = parse_links(rate, latency, None), split_cases(case or SPECS)
    if json is not None:
        check_writable(json)
    if model is not None:
        subject = measure_named(model, shape, device)
    else:
        subject = measure_workload(parse_workload(workload or "", data, device))
    found = advise_on(subject, cases, workers, links)
    print(found)
    if json is not None:
        write_advice(json, subject, workers, links, found, command_line())
