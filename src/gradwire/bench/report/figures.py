"""Plots as files, for documents in which the page's script cannot run.

`write_figures` draws every plot of a report as PNG and SVG with matplotlib; `write_svg` draws bar
charts as one SVG file without it.
"""

import re
from collections.abc import Callable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.bench import human
from gradwire.bench.records.schema import BASELINE, AnyRecord
from gradwire.bench.report.plotdata import Axis, Bar, Bars, Curves, Dots, Plot, ticks
from gradwire.bench.report.section import methods_of
from gradwire.bench.report.write import sections_of
from gradwire.errors import ConfigError, MissingExtra

WIDTH, LABEL, VALUE, ROW, BAR = 900, 300, 170, 22, 14
HEAD, FOOT = 74, 46
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.title{font-size:17px;font-weight:600}"
    ".quiet{fill:#666}.bar{fill:#2f6db3}.line{stroke:#ddd}.gap{stroke:#fff;stroke-width:3}"
)


def write_svg(path: Path, charts: Sequence[tuple[str, Plot]]) -> None:
    """Draws the bar charts below each other, each under the description of its setting."""
    check_svg_name(path)
    text = draw_svg([(setting, plot) for setting, plot in charts if isinstance(plot, Bars)])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the plot to {path}: {error.strerror}") from error


def check_svg_name(path: Path) -> None:
    if path.suffix != ".svg":
        raise ConfigError(f"plot: the file name must end in .svg, got {path}")


def draw_svg(charts: Sequence[tuple[str, Bars]]) -> str:
    parts, top = [], 0
    for setting, bars in charts:
        parts.append(f'<g transform="translate(0,{top})">{_svg_chart(setting, bars)}</g>')
        top += HEAD + ROW * len(bars.traces) + FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" '
        f'viewBox="0 0 {WIDTH} {top}"><style>{STYLE}</style>'
        f'<rect width="{WIDTH}" height="{top}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _svg_chart(setting: str, bars: Bars) -> str:
    most = min(max(bar.total for bar in bars.traces), bars.cut or float("inf")) or 1.0
    scale = (WIDTH - LABEL - VALUE) / most
    bottom = HEAD + ROW * len(bars.traces)
    texts = [
        _svg_text(12, 24, bars.title, "title"),
        _svg_text(12, 43, setting),
        _svg_text(12, 61, bars.caption, "quiet"),
        _svg_text(LABEL, bottom + 34, bars.x.label, "quiet"),
    ]
    lines = [_svg_tick(LABEL + scale * tick, bottom, human.goal(tick)) for tick in ticks(most, 6)]
    rows = [_svg_row(bar, HEAD + ROW * i, scale, most) for i, bar in enumerate(bars.traces)]
    return "".join(texts + lines + rows)


def _svg_row(bar: Bar, top: float, scale: float, most: float) -> str:
    length = scale * min(bar.total, most)
    label = f'<text x="{LABEL - 8}" y="{top + 12}" text-anchor="end">{escape(bar.label)}</text>'
    rect = f'<rect class="bar" x="{LABEL}" y="{top + 1}" width="{length:.1f}" height="{BAR}"/>'
    end = LABEL + length
    # Two slanted gaps near the end mark a bar that is cut off.
    gaps = [f'<path class="gap" d="M{end - x:.1f},{top + BAR + 3}l5,-18"/>' for x in (24, 17)]
    value = " ".join(filter(None, [human.digits(bar.total), bar.note and f"({bar.note})"]))
    cut = "".join(gaps) if bar.total > most else ""
    return label + rect + cut + _svg_text(end + 7, top + 12, value)


def _svg_tick(x: float, bottom: float, text: str) -> str:
    line = f'<path class="line" d="M{x:.1f},{HEAD - 4}V{bottom}"/>'
    return f'{line}<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'


def _svg_text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{escape(text)}</text>'


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
_LineStyle = tuple[str, str]


def write_figures(records: Sequence[AnyRecord], folder: Path) -> list[Path]:
    """Draws every plot of the report into `folder`; returns the paths of the files."""
    if find_spec("matplotlib") is None:
        raise MissingExtra("--plots", "matplotlib", "plots")
    sections = sections_of(records)
    styles = _line_styles([spec for spec in methods_of(sections) if spec != BASELINE])
    written: list[Path] = []
    for number, section in enumerate(sections, start=1):
        for plot in section.plots:
            stem = folder / f"{number}-{_slug(plot.title)}"
            written += _write(plot, section.heading, styles, stem)
    return written


def _line_styles(specs: Sequence[str]) -> dict[str, _LineStyle]:
    """Returns colour and dash of every method; dense is drawn in dark grey."""
    others = {
        spec: (HUES[i % len(HUES)], DASHES[i // len(HUES) % len(DASHES)])
        for i, spec in enumerate(specs)
    }
    return {BASELINE: (INK, "-"), **others}


def _write(plot: Plot, heading: str, styles: dict[str, _LineStyle], stem: Path) -> list[Path]:
    # Without pyplot, which would search for a display and keep every figure alive.
    from matplotlib.figure import Figure

    rows = len(plot.traces) if isinstance(plot, Bars) else 0
    figure = Figure(figsize=(7.2, max(4.4, 1.6 + 0.34 * rows)), layout="constrained")
    axes = figure.subplots()
    # A title of the figure, since headings may be wider than the axes.
    figure.suptitle(f"{plot.title}\n{heading}", x=0.01, ha="left", fontsize=10)
    _draw(axes, plot, styles)
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


def _draw(axes: "Axes", plot: Plot, styles: dict[str, _LineStyle]) -> None:
    if plot.x.log:
        axes.set_xscale("log")
        _use_log(axes.xaxis)
    _label(axes.xaxis, plot.x)
    if isinstance(plot, Bars):
        _draw_bars(axes, plot, styles)
        return
    if plot.y.log:
        axes.set_yscale("log")
        _use_log(axes.yaxis)
    _label(axes.yaxis, plot.y)
    if isinstance(plot, Curves):
        _draw_curves(axes, plot, styles)
    else:
        _draw_dots(axes, plot, styles)


def _draw_curves(axes: "Axes", plot: Curves, styles: dict[str, _LineStyle]) -> None:
    for trace in plot.traces:
        colour, dash = styles[trace.spec]
        # A logarithmic axis cannot show the start of a run, at 0.
        points = [(x, y) for x, y in zip(trace.x, trace.y, strict=True) if x > 0 or not plot.x.log]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.plot(xs, ys, color=colour, linestyle=dash, label=trace.label)
    for level in plot.levels:
        axes.axhline(level.y, color="#5c6570", linestyle=":", label=level.label)
    for mark in plot.marks:
        axes.axvline(mark.x, color="#5c6570", linestyle=":")
        # Above the upper edge of the axes.
        axes.text(mark.x, 1.01, mark.label, transform=axes.get_xaxis_transform(), fontsize=7)
    axes.legend(fontsize=7, frameon=False)


def _draw_dots(axes: "Axes", plot: Dots, styles: dict[str, _LineStyle]) -> None:
    best = [dot for dot in plot.traces if dot.best]
    axes.plot([d.x for d in best], [d.y for d in best], color="#5c6570", linestyle="--", zorder=1)
    for dot in plot.traces:
        colour = styles[dot.spec][0]
        axes.plot([dot.x, dot.x], [dot.low, dot.high], color=colour, alpha=0.6)
        axes.scatter([dot.x], [dot.y], color=colour, zorder=2, label=dot.spec)
    axes.legend(fontsize=7, frameon=False)


def _draw_bars(axes: "Axes", plot: Bars, styles: dict[str, _LineStyle]) -> None:
    named: set[str] = set()
    for row, bar in enumerate(plot.traces):
        start = 0.0
        for part in bar.segments:
            split = part.name in plot.names
            colour = PARTS[plot.names.index(part.name)] if split else styles[bar.spec][0]
            label = part.name if split and part.name not in named else None
            axes.barh(row, part.value, left=start, color=colour, label=label)
            named.add(part.name)
            start += part.value
        if start > 1.001 * bar.total:
            # Overlapping parts add up to more than the step; the line marks its end.
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

    # Two labels per decade fit, even for six decades.
    axis.set_major_locator(LogLocator(subs=(1, 3), numticks=30))
    axis.set_minor_formatter(NullFormatter())


def _label(axis: Any, spec: Axis) -> None:
    axis.axes.set(**{f"{axis.axis_name}label": spec.label})
    axis.set_major_formatter(lambda value, _: _UNITS[spec.unit](value))
    axis.set_tick_params(labelsize=7)


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
