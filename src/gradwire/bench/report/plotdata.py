"""Plots as data: traces, axes, ticks and captions, independent of the renderer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, TypeAlias, TypeVar

T = TypeVar("T")

Unit = Literal["s", "ms", "B", ""]

# A curve is at most this many pixels wide; more points only make the page larger.
MOST_POINTS = 600


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis; `log` is its initial scale, which the reader may toggle by the short `name`.

    If it `rises`, growing values are expected and do not mean divergence.
    """

    name: str
    label: str
    unit: Unit = ""
    log: bool = False
    rises: bool = False


@dataclass(frozen=True, kw_only=True)
class Curve:
    spec: str
    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    step: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Level:
    """A horizontal line to compare with, such as the target loss."""

    label: str
    y: float


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line where a condition changes, such as the rate of the links."""

    label: str
    x: float


@dataclass(frozen=True, kw_only=True)
class Curves:
    kind: Literal["curves"] = field(default="curves", init=False)
    place: int
    title: str
    caption: str
    x: Axis
    y: Axis
    traces: tuple[Curve, ...]
    levels: tuple[Level, ...] = ()
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Segment:
    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Segments laid end to end; `total` is the measured value, `low` to `high` its spread."""

    spec: str
    label: str
    segments: tuple[Segment, ...]
    total: float
    note: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars in the colour of the method, or with one colour per segment listed in `names`.

    Bars longer than `cut` are cut off there, so that short ones can be read.
    """

    kind: Literal["bars"] = field(default="bars", init=False)
    place: int
    title: str
    caption: str
    x: Axis
    traces: tuple[Bar, ...]
    names: tuple[str, ...] = ()
    cut: float | None = None


@dataclass(frozen=True)
class Dot:
    """The result of a method; `best` if no method with at most its cost is better."""

    spec: str
    x: float
    y: float
    low: float
    high: float
    best: bool


@dataclass(frozen=True, kw_only=True)
class Dots:
    """Methods as dots, and a line through the Pareto front."""

    kind: Literal["dots"] = field(default="dots", init=False)
    place: int
    title: str
    caption: str
    x: Axis
    y: Axis
    traces: tuple[Dot, ...]


Plot: TypeAlias = Curves | Bars | Dots


def subsample(points: Sequence[T]) -> list[T]:
    """Returns at most MOST_POINTS points, evenly spaced, with the first and the last."""
    if len(points) <= MOST_POINTS:
        return list(points)
    stride = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(i * stride)] for i in range(MOST_POINTS)]


def cut_at(lengths: Sequence[float]) -> float | None:
    """Returns where to cut off bars that are too long to compare the others; None if none is."""
    enough = 3 * median(lengths)
    return enough if max(lengths) > 2 * enough else None


def ticks(most: float, about: int) -> list[float]:
    """Returns round numbers from 0 to `most`, about `about` of them."""
    raw = most / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [step * i for i in range(math.floor(most / step + 1e-9) + 1)]
