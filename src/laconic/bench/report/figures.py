"""The plots of a report as files, PNG and SVG, for documents in which its script cannot run."""

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.bench import human
from laconic.bench.records.kinds import BASELINE, AnyRecord
from laconic.bench.report.plotdata import Axis, Bars, Curves, Dots, Plot
from laconic.bench.report.section import methods_of
from laconic.bench.report.write import sections_of
from laconic.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg")
INK = "#3b4149"
# The page's colours, in the page's order.
HUES = ("#0072b2", "#d98200", "#009e73", "#c2609a", "#48a9e0", "#c8500a")
PARTS = ("#44aa99", "#882255", "#d6bd4f", "#c9ced4", "#e3e6e9", "#7aa6d8")
DASHES = ("-", "--", ":")
_UNITS: dict[str, Callable[[float], str]] = {
    "s": human.duration_s,
    "ms": human.duration_ms,
    "B": human.byte_size,
    "": human.goal,
}
_Look = tuple[str, str]


def write_figures(records: Sequence[AnyRecord], folder: Path) -> list[Path]:
    """Draws every plot of the report into `folder`; the paths of what was written."""
    if find_spec("matplotlib") is None:
        raise MissingExtra("--plots", "matplotlib", "plots")
    sections = sections_of(records)
    looks = _looks([spec for spec in methods_of(sections) if spec != BASELINE])
    written: list[Path] = []
    for number, section in enumerate(sections, start=1):
        for plot in section.plots:
            stem = folder / f"{number}-{_slug(plot.title)}"
            written += _write(plot, section.heading, looks, stem)
    return written


def _looks(specs: Sequence[str]) -> dict[str, _Look]:
    """Colour and dash of every method, dense in ink."""
    others = {
        spec: (HUES[i % len(HUES)], DASHES[i // len(HUES) % len(DASHES)])
        for i, spec in enumerate(specs)
    }
    return {BASELINE: (INK, "-"), **others}


def _write(plot: Plot, heading: str, looks: dict[str, _Look], stem: Path) -> list[Path]:
    # Without pyplot: it would look for a screen and keep every figure alive.
    from matplotlib.figure import Figure

    rows = len(plot.traces) if isinstance(plot, Bars) else 0
    figure = Figure(figsize=(7.2, max(4.4, 1.6 + 0.34 * rows)), layout="constrained")
    axes = figure.subplots()
    # On the figure, which is as wide as a heading may be.
    figure.suptitle(f"{plot.title}\n{heading}", x=0.01, ha="left", fontsize=10)
    _draw(axes, plot, looks)
    axes.grid(color="#eceef0")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in FORMATS]
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            figure.savefig(path, dpi=160)
    except OSError as error:
        raise ConfigError(f"cannot write plots to {stem.parent}: {error.strerror}") from error
    return paths


def _draw(axes: "Axes", plot: Plot, looks: dict[str, _Look]) -> None:
    if plot.x.log:
        axes.set_xscale("log")
        _use_log(axes.xaxis)
    _label(axes.xaxis, plot.x)
    if isinstance(plot, Bars):
        _draw_bars(axes, plot, looks)
        return
    if plot.y.log:
        axes.set_yscale("log")
        _use_log(axes.yaxis)
    _label(axes.yaxis, plot.y)
    if isinstance(plot, Curves):
        _draw_curves(axes, plot, looks)
    else:
        _draw_dots(axes, plot, looks)


def _draw_curves(axes: "Axes", plot: Curves, looks: dict[str, _Look]) -> None:
    for trace in plot.traces:
        colour, dash = looks[trace.spec]
        # The start of a run has no place on an axis without 0.
        seen = [(x, y) for x, y in zip(trace.x, trace.y, strict=True) if x > 0 or not plot.x.log]
        xs, ys = zip(*seen, strict=True) if seen else ((), ())
        axes.plot(xs, ys, color=colour, linestyle=dash, label=trace.label)
    for level in plot.levels:
        axes.axhline(level.y, color="#5c6570", linestyle=":", label=level.label)
    for mark in plot.marks:
        axes.axvline(mark.x, color="#5c6570", linestyle=":")
        # Above the plane, at the height of its edge.
        axes.text(mark.x, 1.01, mark.label, transform=axes.get_xaxis_transform(), fontsize=7)
    axes.legend(fontsize=7, frameon=False)


def _draw_dots(axes: "Axes", plot: Dots, looks: dict[str, _Look]) -> None:
    best = [dot for dot in plot.traces if dot.best]
    axes.plot([d.x for d in best], [d.y for d in best], color="#5c6570", linestyle="--", zorder=1)
    for dot in plot.traces:
        colour = looks[dot.spec][0]
        axes.plot([dot.x, dot.x], [dot.low, dot.high], color=colour, alpha=0.6)
        axes.scatter([dot.x], [dot.y], color=colour, zorder=2, label=dot.spec)
    axes.legend(fontsize=7, frameon=False)


def _draw_bars(axes: "Axes", plot: Bars, looks: dict[str, _Look]) -> None:
    named: set[str] = set()
    for row, bar in enumerate(plot.traces):
        start = 0.0
        for part in bar.segments:
            split = part.name in plot.names
            colour = PARTS[plot.names.index(part.name)] if split else looks[bar.spec][0]
            label = part.name if split and part.name not in named else None
            axes.barh(row, part.value, left=start, color=colour, label=label)
            named.add(part.name)
            start += part.value
        if start > 1.001 * bar.total:
            # What overlaps adds up to more than the step, which ends here.
            axes.plot([bar.total] * 2, [row - 0.45, row + 0.45], color=INK)
    names = [f"{bar.label}\n{_UNITS[plot.x.unit](bar.total)}" for bar in plot.traces]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    if plot.cut is not None:
        axes.set_xlim(0, plot.cut)
    if plot.names:
        axes.legend(fontsize=7, frameon=False)


def _use_log(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    # Two names a decade have room, also when there are six.
    axis.set_major_locator(LogLocator(subs=(1, 3), numticks=30))
    axis.set_minor_formatter(NullFormatter())


def _label(axis: Any, said: Axis) -> None:
    axis.axes.set(**{f"{axis.axis_name}label": said.label})
    axis.set_major_formatter(lambda value, _: _UNITS[said.unit](value))
    axis.set_tick_params(labelsize=7)


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
