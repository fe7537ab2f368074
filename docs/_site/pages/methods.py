"""One page a method, made from its class: what it says, costs and loses, and goes with."""

import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from inspect import cleandoc, formatannotation, getdoc, getmodule
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from gradwire.base import Compressor, MultiRound, OneRound
from gradwire.catalogue import Row, rows
from gradwire.errors import ConfigError
from gradwire.spec import compressor_classes, format_spec
from pages import measure, plot
from pages.company import company
from pages.markdown import code, fence, listed, table

WHEN = {
    "dense": "As a baseline, and where the network is not what training waits for.",
    "quantisation": "Where a step is to be 2 to 32 times smaller with little to tune: every entry "
    "is said, with fewer bits. Below 4 bits the error is what error feedback or averaging over "
    "workers has to make up for.",
    "sparsification": "On slow links: a hundred times less and more, since most entries wait in "
    "the residual. Watch the number of workers: gathered messages add up, so the gain shrinks "
    "as workers are added (`sharded` and `mean` do not have that).",
    "hybrid": "On slow links, where even the values of chosen entries are too much.",
    "low rank": "For models made of large matrices: the message grows with the sides of a matrix, "
    "not with its area. Most of them travel by all-reduce, so they scale to many workers.",
}
"""When a method of a family helps; what is special to one is in its own text."""


class Method(NamedTuple):
    """A method in its usual setting."""

    name: str
    cls: type[Compressor]
    row: Row

    @property
    def usual(self) -> Compressor:
        return self.cls(**self.cls.examples[0])


def methods() -> list[Method]:
    """The catalogue in the order of its table."""
    classes = compressor_classes()
    return [Method(row.name, classes[row.name], row) for row in rows()]


def page(method: Method, wire: dict[str, str]) -> str:
    """The page of one method; `wire` are the parts of messages as the wire format names them."""
    codec, paper = method.usual, _linked(method.cls.paper)
    parts = [
        f"# {method.name}",
        cleandoc(getdoc(getmodule(method.cls)) or ""),
        f"Family: {method.cls.family}. Source: {paper}.",
        fence(f'link = gradwire.attach(ddp_model, "{method.row.spec}")'),
        "## What it does",
        getdoc(method.cls) or "",
        _parameters(method.cls),
        "## When it helps",
        WHEN[method.cls.family],
        "## What it goes with",
        company(codec, method.row),
        "## On the wire",
        _wire(method, codec, wire),
        "## Error and bits",
        _plot(method, codec),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def overview(found: Sequence[Method]) -> str:
    """A table for each family, with a link to the page of every method."""
    parts = []
    for family in dict.fromkeys(m.row.family for m in found):
        lines = [_overview_line(m) for m in found if m.row.family == family]
        columns = ("method", "what it sends", "memory", "exchange", "bits", "error")
        parts += [f"## {family.capitalize()}", table(columns, lines, words=4)]
    return "\n\n".join(parts)


def _overview_line(m: Method) -> list[str]:
    error = measure.error(m.usual, measure.gradient())
    link, exchange = f"[{code(m.row.spec)}]({m.name}.md)", m.row.exchange.replace(":", ": ")
    bits = f"{m.row.bits_per_element:.3g}"
    return [link, m.row.summary, m.row.memory, exchange, bits, f"{error:.2g}"]


def wire_parts(text: str) -> dict[str, str]:
    """What docs/wire.md says of the parts of each method's message."""
    found: dict[str, str] = {}
    for names, parts in re.findall(r"^\| ((?:`[a-z0-9-]+`(?:, )?)+) \| (.*) \|$", text, re.M):
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", names), parts)
    return found


def _parameters(cls: type[Compressor]) -> str:
    own = fields(cls)  # type: ignore[arg-type]
    if not own:
        return "It has no parameters."
    hints = get_type_hints(cls)
    lines = [(code(f.name), _kind(hints[f.name]), _default(f)) for f in own]
    examples = listed(code(format_spec(cls(**example))) for example in cls.examples)
    return f"{table(('parameter', 'type', 'default'), lines, words=3)}\n\nFor example: {examples}."


def _kind(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(code(str(value)) for value in get_args(hint))
    return code(formatannotation(hint))


def _default(f: Field[Any]) -> str:
    return "must be given" if f.default is MISSING else code(str(f.default))


def _wire(method: Method, codec: Compressor, wire: dict[str, str]) -> str:
    if method.name not in wire:
        raise ConfigError(f"docs/wire.md: no row for the parts of {method.name!r}")
    payload = codec.encode(measure.noise())
    said = [(f"{i}", code(_type(p)), f"{p.numel():,}") for i, p in enumerate(payload.parts, 1)]
    sizes = [
        (f"{rows:,} x {cols:,}", f"{size.nbytes:,}", f"{size.bits:.4g}")
        for size in measure.sizes(codec)
        for rows, cols in [size.shape]
    ]
    rounds = "" if isinstance(codec, OneRound) else _rounds(codec)
    intro = f"A message holds: {wire[method.name]} ([the formats](../wire.md)).{rounds}"
    parts = f"The parts of a message about {measure.SIDE} x {measure.SIDE} normal entries:"
    cost = f"Messages of {code(method.row.spec)}, encoded and measured{_formula(codec)}:"
    return "\n\n".join(
        [
            intro,
            parts,
            table(("part", "type", "entries"), said, words=2),
            cost,
            table(("tensor", "bytes", "bits an element"), sizes),
        ]
    )


def _formula(codec: Compressor) -> str:
    """The bytes of a message as a formula, where there is a plain one."""
    if codec.traits().variable_length:
        return " (their length depends on what they say)"
    formula = measure.formula(codec)
    return "" if formula is None else f" (bytes = {formula} for large tensors)"


def _rounds(codec: Compressor) -> str:
    assert isinstance(codec, MultiRound)
    return f" It talks in rounds of its own, by exchange `{codec.rounds_like}`."


def _type(part: Any) -> str:
    return str(part.dtype).removeprefix("torch.")


def _plot(method: Method, codec: Compressor) -> str:
    sweep = measure.sweep(codec)
    title = f"{method.name}: relative error and bits an element by {sweep.axis}"
    scaled = " Votes have no length: the error is that of the best one." * codec.traits().is_vote
    text = (
        "One message, without the help of a memory: |x - said| / |x| for the gradient of a linear "
        f"layer ({measure.SIDE} x {measure.SIDE}, batch 32), and for normal entries in which there "
        f"is nothing to find.{scaled} Other parameters as in {code(method.row.spec)}."
    )
    return f'{text}\n\n<figure class="plot">\n{plot.draw(sweep, title)}\n</figure>'


def _linked(paper: str) -> str:
    """The paper, with a link where its number is one of arXiv."""
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)


def read_wire_parts(docs: Path) -> dict[str, str]:
    return wire_parts((docs / "wire.md").read_text(encoding="utf-8"))
