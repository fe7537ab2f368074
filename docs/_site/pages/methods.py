"""Generates one page per method from its class: format, size, error and compatibility."""

import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from inspect import cleandoc, formatannotation, getdoc, getmodule
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from gradwire.base import Compressor, MultiRound, OneRound
from gradwire.catalogue import Row, rows
from gradwire.spec import compressor_classes, format_spec
from pages import measure, method_results, plot
from pages.compatibility import compatibility
from pages.markdown import code, fence, listed, table
from pages.method_results import Result

ADAM = (
    "entries that arrive late and at once are divided by their magnitude, and training stalls "
    "([study](../../results/studies.md#gradients-under-adamw)). Use `int4` or `powersgd:rank=4` "
    "there, or a [local method](../../explanation/local-sgd.md), which compresses the optimiser's "
    "updates instead."
)
WHEN = {
    "dense": "As a baseline, and where training does not wait for the network.",
    "quantisation": "Where a step is to be 2 to 32 times smaller with little to tune: every entry "
    "is sent, with fewer bits. Below 4 bits the error must be corrected by error feedback or by "
    "averaging over workers.",
    "sparsification": "On slow links: a hundred times fewer bytes or better, since most entries "
    "stay in the residual. Mind the number of workers: gathered messages add up, so the gain "
    "shrinks as workers are added (not with `sharded` and `mean`). Not for the gradients of Adam "
    f"or AdamW: {ADAM}",
    "hybrid": "On slow links, where even the values of selected entries are too much. Not for the "
    f"gradients of Adam or AdamW: {ADAM}",
    "low rank": "For models made of large matrices: the message grows with the sides of a matrix, "
    "not with its area. Most of them use an all-reduce, so they scale to many workers.",
}
"""When a family of methods helps; the docstring of a method adds its own."""


class Method(NamedTuple):
    """A method in its usual setting."""

    name: str
    cls: type[Compressor]
    row: Row

    @property
    def usual(self) -> Compressor:
        return self.cls(**self.cls.examples[0])


def methods() -> list[Method]:
    """Returns the catalogue in the order of its table."""
    classes = compressor_classes()
    return [Method(row.name, classes[row.name], row) for row in rows()]


def page(method: Method, results: Sequence[Result] = ()) -> str:
    """Returns the page of one method, with the quality that its runs ended with."""
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
        "## Accuracy on record",
        method_results.text(results),
        "## Compatibility",
        compatibility(codec, method.row),
        "## On the wire",
        _wire(method, codec),
        "## Error and bits",
        _plot(method, codec),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def overview(found: Sequence[Method]) -> str:
    """Returns a table for each family, with a link to the page of every method."""
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


def _wire(method: Method, codec: Compressor) -> str:
    payload = codec.encode(measure.noise())
    parts_table = [
        (f"{i}", code(_type(p)), f"{p.numel():,}") for i, p in enumerate(payload.parts, 1)
    ]
    sizes = [
        (f"{rows:,} x {cols:,}", f"{size.nbytes:,}", f"{size.bits:.4g}")
        for size in measure.sizes(codec)
        for rows, cols in [size.shape]
    ]
    rounds = "" if isinstance(codec, OneRound) else _rounds(codec)
    intro = f"A message holds: {method.cls.message} ([the formats](../wire.md)).{rounds}"
    parts = f"The parts of a message of {measure.SIDE} x {measure.SIDE} normal entries:"
    cost = f"Messages of {code(method.row.spec)}, encoded and measured{_formula(codec)}:"
    return "\n\n".join(
        [
            intro,
            parts,
            table(("part", "type", "entries"), parts_table, words=2),
            cost,
            table(("tensor", "bytes", "bits per element"), sizes),
        ]
    )


def _formula(codec: Compressor) -> str:
    """Returns the bytes of a message as a formula, if there is a simple one."""
    if codec.traits().variable_length:
        return " (their length depends on the input)"
    formula = measure.formula(codec)
    return "" if formula is None else f" (bytes = {formula} for large tensors)"


def _rounds(codec: Compressor) -> str:
    assert isinstance(codec, MultiRound)
    return f" It defines its own rounds, like exchange `{codec.rounds_like}`."


def _type(part: Any) -> str:
    return str(part.dtype).removeprefix("torch.")


def _plot(method: Method, codec: Compressor) -> str:
    sweep = measure.sweep(codec)
    title = f"{method.name}: relative error and bits per element by {sweep.axis}"
    scaled = " Votes have no scale: the error is that of the best one." * codec.traits().is_vote
    text = (
        "One message, without a memory: |x - decoded| / |x| for the gradient of a linear "
        f"layer ({measure.SIDE} x {measure.SIDE}, batch 32), and for normal entries, which have no "
        f"structure.{scaled} Other parameters as in {code(method.row.spec)}."
    )
    return f'{text}\n\n<figure class="plot">\n{plot.draw(sweep, title)}\n</figure>'


def _linked(paper: str) -> str:
    """Returns the paper, with a link if it has an arXiv number."""
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)
