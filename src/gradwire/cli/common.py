"""Shared by all commands: options and their parsers, and exit codes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.errors import ConfigError

if TYPE_CHECKING:
    from gradwire.bench.predictions.simulate import Links
    from gradwire.bench.runs.cluster_run import Ending

Workers = Annotated[int, typer.Option(help="Emulated hosts, one worker on each.")]
Rate = Annotated[str, typer.Option(help="Rate of every link, such as 100mbit; none: unshaped.")]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Appends the results to this file as JSON lines; - prints them."),
]
Latency = Annotated[str, typer.Option(help="Latency of a hop, such as 0.1ms.")]
LinksFile = Annotated[
    Path | None, typer.Option("--links", help="A JSON file that describes the links.")
]
Cases = Annotated[
    list[str] | None,
    typer.Option("--case", "--cases", help="Specs or baselines; repeat, or separate by commas."),
]
Specs = Annotated[
    list[str] | None,
    typer.Option("--case", "--cases", help="Specs; repeat, or separate by commas."),
]
WorkloadText = Annotated[
    str, typer.Option("--workload", help="NAME[:key=value,...] of `gradwire bench workloads`.")
]
Data = Annotated[Path | None, typer.Option(help="Folder of the data set.")]
Device = Annotated[str, typer.Option(help="cpu or cuda; workers may share one GPU.")]
Commit = Annotated[
    str | None, typer.Option(help="Commit for the records, if there is no checkout.")
]

_MAX_COUNT = 10**15
"""Upper bound of all counts; past 2^53 a float could not represent every whole number."""


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
    """Parses whole numbers from 1, which may be written as 1e6."""
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        raise _not_sizes(option, text) from None
    if not all(number.is_integer() and 1 <= number <= _MAX_COUNT for number in numbers):
        raise _not_sizes(option, text)
    return tuple(int(number) for number in numbers)


def _not_sizes(option: str, text: str) -> ConfigError:
    return ConfigError(
        f"{option}: expected whole numbers from 1 to 1e15 such as 8,1e6, got {text!r}"
    )


def parse_factors(text: str) -> tuple[float, float]:
    """Parses two numbers."""
    try:
        low, high = (float(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"levels: expected two factors such as 10,1000, got {text!r}") from None
    return low, high


def parse_seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"seeds: expected numbers such as 0,1,2, got {text!r}") from None


def parse_links(rate: str, latency: str, inside: str | None) -> Links:
    from gradwire.bench.predictions.simulate import Links
    from gradwire.comm.cost_model import parse_latency, parse_rate

    inside_bits = None if inside is None else parse_rate(inside)
    return Links(parse_rate(rate), parse_latency(latency), inside_bits)


def named_rate(text: str) -> str | None:
    """Returns the rate of shaped links, or None for the text `none`."""
    return None if text == "none" else text


INTERRUPTED = 130
_CODES: dict[Ending, int] = {"done": 0, "failed": 1, "interrupted": INTERRUPTED}


def command_line() -> str:
    """Returns the command line, for the records."""
    return shlex.join(["gradwire", *sys.argv[1:]])


def exit_with(ending: Ending) -> None:
    """Ends the process with the exit code of the result."""
    raise typer.Exit(_CODES[ending])
