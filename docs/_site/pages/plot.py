"""Draws a method's plot as inline SVG in the page's text colour: legible in light and dark."""

import io
import re
from typing import TYPE_CHECKING

from pages.measure import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#123456"
"""A placeholder that is replaced by the page's text colour."""

OWN, OTHER = "#2a8fd8", "#d98200"
"""Colours of the gradient and of noise; both have contrast on white and on black."""

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gradwire",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

WIDE, TINY = 10, 1e-3
"""Values whose range exceeds this factor get a logarithmic axis, unless some are nearly 0."""

MARKS = ((OWN, "o"), (OTHER, "s"))


def draw(sweep: Sweep, title: str) -> str:
    """Draws relative error, and bits per element, along the method's axis."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 2.5))
        figure.subplots_adjust(left=0.08, right=0.99, bottom=0.18, top=0.96, wspace=0.24)
        left, right = figure.subplots(1, 2)
        errors = {
            "a gradient": [p.error for p in sweep.points],
            "noise": [p.noise_error for p in sweep.points],
        }
        _panel(left, sweep, "relative error", errors)
        _panel(right, sweep, "bits an element", {"": [p.bits for p in sweep.points]})
        left.legend(frameon=False, fontsize=8)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _inside_a_page(file.getvalue(), title)


def _panel(axes: "Axes", sweep: Sweep, label: str, lines: dict[str, list[float]]) -> None:
    xs = [point.x for point in sweep.points]
    for (name, ys), (colour, mark) in zip(lines.items(), MARKS, strict=False):
        axes.plot(xs, ys, color=colour, marker=mark, markersize=4, label=name)
    values = [y for ys in lines.values() for y in ys]
    axes.set(xlabel=sweep.axis, ylabel=label)
    if max(xs) > WIDE * min(xs):
        axes.set_xscale("log")
    if max(values) > WIDE * min(values) and min(values) > TINY:
        axes.set_yscale("log")
    else:
        # From 0, since small differences would look like large ones otherwise.
        axes.set_ylim(0, 1.05 * max(values) or 1)
    axes.set_xticks(xs, [f"{x:.3g}" for x in xs])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.grid(color=INK, alpha=0.15, linewidth=0.5)


def _inside_a_page(svg: str, title: str) -> str:
    """Returns the SVG element alone, scaled to its column, with a title for screen readers."""
    svg = svg[svg.index("<svg") :]
    # Metadata is not needed here, and a style element would apply to the whole page.
    svg = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;]*;", "font-family: inherit;", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return re.sub(r"\n\s*", "\n", svg.replace(INK, "currentColor")).strip()
