"""Draws a study as SVG: quality, bytes and speed of every method; factors and losses over time.

The file is legible on white and on black. Its description holds a digest of what was drawn, so that
a test can compare it with the records without drawing.
"""

import hashlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

from pages.plot import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#808080"
"""Has a contrast of about 4 on white and 5 on black."""
COLOURS = ("#2a8fd8", "#d98200", "#2ca05a", "#b565c9", "#d1495b", "#8a8a2a")
MARKS = ("o", "s", "D", "^", "v", "P")
LABEL_HEAD, LABEL_TAIL = 18, 38
"""Letters that are kept of the start and of the end of a long label."""
ROW_INCHES, MARGIN_INCHES = 0.24, 0.75


@dataclass(frozen=True)
class Method:
    """One row: what a method ended at, and its bytes and steps per time relative to dense."""

    label: str
    quality: float
    spread: float
    fewer_bytes: float | None
    speed: dict[str, float]
    """By the rate of the links."""


@dataclass(frozen=True)
class MethodsPlot:
    quality_name: str
    baseline: str
    methods: tuple[Method, ...]


@dataclass(frozen=True)
class Curve:
    """Compression factors of a controller: each holds from its step on, to the next."""

    label: str
    steps: tuple[int, ...]
    factors: tuple[float, ...]
    last_step: int


@dataclass(frozen=True)
class Race:
    """The losses of a method over the time of its training."""

    label: str
    seconds: tuple[float, ...]
    losses: tuple[float, ...]


Drawn: TypeAlias = MethodsPlot | tuple[Curve, ...] | tuple[Race, ...]


def digest(drawn: Drawn) -> str:
    """Returns a digest of what is drawn."""
    data = asdict(drawn) if isinstance(drawn, MethodsPlot) else [asdict(c) for c in drawn]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def described_digest(svg: str) -> str | None:
    """Returns the digest in the description of a file."""
    match = re.search(r"<desc>records (\w+)</desc>", svg)
    return match[1] if match else None


def draw_methods(drawn: MethodsPlot, title: str) -> str:
    """Draws three panels with a row per method; the dense one is at the top."""
    figure = _figure(MARGIN_INCHES + ROW_INCHES * len(drawn.methods))
    left, middle, right = figure.subplots(1, 3, sharey=True)
    rows = range(len(drawn.methods))
    labels = [_short(method.label) for method in drawn.methods]
    left.set_yticks([*rows], labels)
    left.set_ylim(len(drawn.methods) - 0.4, -0.6)
    _quality(left, drawn)
    _points(middle, "times fewer bytes", [m.fewer_bytes for m in drawn.methods], 0)
    for index, rate in enumerate(_rates(drawn)):
        _points(right, "steps per time, dense = 1", _speeds(drawn, rate), index, rate)
    if len(_rates(drawn)) > 1:
        figure.legend(frameon=False, fontsize=7, loc="outside upper right", ncols=3)
    for axes in (left, middle, right):
        axes.grid(color=INK, alpha=0.3, linewidth=0.5)
    return _svg(figure, title, digest(drawn))


def draw_races(races: Sequence[Race], title: str) -> str:
    """Draws the loss of every method over the logarithm of the time."""
    figure = _figure(3.4)
    axes = figure.subplots()
    for race, colour in zip(races, COLOURS * len(races), strict=False):
        axes.plot(race.seconds, race.losses, color=colour, linewidth=1.4, label=_short(race.label))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="seconds of training", ylabel="held-out loss")
    axes.legend(frameon=False, fontsize=7)
    axes.grid(color=INK, alpha=0.3, linewidth=0.5)
    return _svg(figure, title, digest(tuple(races)))


def draw(drawn: Drawn, title: str) -> str:
    """Draws whichever plot it is."""
    if isinstance(drawn, MethodsPlot):
        return draw_methods(drawn, title)
    races = [race for race in drawn if isinstance(race, Race)]
    curves = [curve for curve in drawn if isinstance(curve, Curve)]
    return draw_races(races, title) if races else draw_factors(curves, title)


def draw_factors(curves: Sequence[Curve], title: str) -> str:
    """Draws the compression factor of every controller over the steps, dense as 1."""
    figure = _figure(3.0)
    axes = figure.subplots()
    for curve, colour in zip(curves, COLOURS * len(curves), strict=False):
        steps = [*curve.steps, curve.last_step]
        factors = [*curve.factors, curve.factors[-1]]
        axes.step(steps, factors, where="post", color=colour, label=_short(curve.label))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="step", ylabel="compression factor")
    axes.legend(frameon=False, fontsize=6.5, loc="upper left", bbox_to_anchor=(0, -0.2))
    axes.grid(color=INK, alpha=0.3, linewidth=0.5)
    return _svg(figure, title, digest(tuple(curves)))


def _quality(axes: "Axes", drawn: MethodsPlot) -> None:
    for row, method in enumerate(drawn.methods):
        axes.errorbar(
            method.quality, row, xerr=method.spread or None, fmt="o", color=COLOURS[0], markersize=4
        )
    dense = [m.quality for m in drawn.methods if m.label == drawn.baseline]
    if dense:
        axes.axvline(dense[0], color=INK, linewidth=0.8, linestyle="--")
    axes.set_xlabel(drawn.quality_name)


def _points(
    axes: "Axes", name: str, values: Sequence[float | None], index: int, label: str | None = None
) -> None:
    places = [(x, row) for row, x in enumerate(values) if x is not None]
    xs, rows = [x for x, _ in places], [row for _, row in places]
    marker, colour = MARKS[index], COLOURS[index]
    axes.plot(xs, rows, marker, color=colour, markersize=4, label=label)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel(name)


def _rates(drawn: MethodsPlot) -> list[str]:
    return list(dict.fromkeys(rate for method in drawn.methods for rate in method.speed))


def _speeds(drawn: MethodsPlot, rate: str) -> list[float | None]:
    return [method.speed.get(rate) for method in drawn.methods]


def _short(label: str) -> str:
    if len(label) <= LABEL_HEAD + LABEL_TAIL:
        return label
    return f"{label[:LABEL_HEAD]}…{label[-LABEL_TAIL:]}"


def _figure(height: float) -> "Figure":
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({key: INK if str(v).startswith("#") else v for key, v in STYLE.items()})
    mpl.rcParams["font.size"] = 8
    return Figure(figsize=(9.6, height), layout="constrained")


def _svg(figure: "Figure", title: str, drawn: str) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    end = svg.index(">") + 1
    lines = f"{svg[:end]}<desc>records {drawn}</desc>{svg[end:]}".splitlines()
    return "\n".join(line.strip() for line in lines if line.strip()) + "\n"
