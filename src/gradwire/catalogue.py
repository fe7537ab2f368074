"""The table of methods, generated from the classes of the catalogue."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from inspect import getdoc
from pathlib import Path
from typing import NamedTuple, get_args

import torch

from gradwire.base import Compressor, Family
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.identity import PACKAGE
from gradwire.registry import COMPRESSORS
from gradwire.spec import compressor_classes, format_spec

SHAPE = (1000, 1000)
"""Shape of the tensor for which bits are counted."""

WORKERS = 8
"""World size for which the default exchange is shown."""

BEGIN, END = "<!-- methods: begin -->", "<!-- methods: end -->"


@dataclass(frozen=True)
class Row:
    """A method in its usual setting."""

    name: str
    spec: str
    cls: str
    family: str
    bits_per_element: float
    unbiased: bool
    contraction: bool
    summable: bool
    memory: str
    exchange: str
    paper: str
    summary: str
    distribution: str = PACKAGE
    """The installed distribution that the method comes from."""


class BrokenPlugin(NamedTuple):
    """A method of another distribution that cannot be used, and the reason."""

    name: str
    distribution: str
    reason: str


def rows() -> list[Row]:
    """Returns the methods of this package, sorted by family and name."""
    found = [_row(name, cls) for name, cls in compressor_classes().items()]
    order = get_args(Family)
    return sorted(found, key=lambda row: (order.index(row.family), row.name))


def plugin_rows() -> tuple[list[Row], list[BrokenPlugin]]:
    """Returns the methods of other distributions by name, and those that cannot be used."""
    found: list[Row] = []
    broken: list[BrokenPlugin] = []
    for name, distribution in COMPRESSORS.origins():
        try:
            cls = COMPRESSORS.find(name)
            if cls is not None and distribution != PACKAGE:
                found.append(replace(_row(name, cls), distribution=distribution))
        except Exception as error:  # one plug-in must not hide the others
            broken.append(BrokenPlugin(name, distribution, f"{type(error).__name__}: {error}"))
    return found, broken


def _row(name: str, cls: type[Compressor]) -> Row:
    usual = cls(**cls.examples[0])
    plan = make_plan(usual, None, "auto", [torch.empty(SHAPE, device="meta")], WORKERS)
    traits = usual.traits()
    return Row(
        name=name,
        spec=format_spec(usual),
        cls=cls.__name__,
        family=cls.family,
        bits_per_element=round(8 * usual.nbytes(SHAPE) / torch.Size(SHAPE).numel(), 3),
        unbiased=traits.unbiased,
        contraction=traits.contraction,
        summable=traits.summable,
        memory=format_spec(plan.memory),
        exchange=str(plan.exchange),
        paper=cls.paper,
        summary=(getdoc(cls) or "").split("\n", maxsplit=1)[0],
    )


def as_dict(row: Row) -> dict[str, object]:
    return asdict(row)


def markdown(table: Iterable[Row]) -> str:
    """Returns the table as Markdown, for docs/reference/methods/table.md."""
    lines = [
        "| method | family | bits an element | memory | exchange | what it sends | source |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in table:
        summary = r.summary.replace("|", "\\|")
        cells = [f"`{r.spec}`", r.family, f"{r.bits_per_element:g}", r.memory, r.exchange]
        lines.append(f"| {' | '.join([*cells, summary, r.paper])} |")
    return "\n".join(lines)


def write_into(path: Path) -> None:
    """Replaces the table between the marks of a Markdown file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"markdown: must be a file, got {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"markdown: must be a file of text, got {path}") from None
    if BEGIN not in text or END not in text:
        raise ConfigError(f"{path}: expected the marks {BEGIN} and {END}")
    head, rest = text.split(BEGIN, maxsplit=1)
    tail = rest.split(END, maxsplit=1)[1]
    _write(path, f"{head}{BEGIN}\n{markdown(rows())}\n{END}{tail}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"markdown: cannot write to {path}: {error.strerror}") from error
