"""Bar charts as one SVG file: for documents, where the report's script cannot run."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from laconic.bench import human
from laconic.bench.report.plotdata import Bar, Bars, Plot
from laconic.bench.report.ruler import ticks
from laconic.errors import ConfigError

WIDTH, LABEL, VALUE, ROW, BAR = 900, 300, 170, 22, 14
HEAD, FOOT = 74, 46
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.title{font-size:17px;font-weight:600}"
    ".quiet{fill:#666}.bar{fill:#2f6db3}.line{stroke:#ddd}.gap{stroke:#fff;stroke-width:3}"
)


def write_svg(path: Path, charts: Sequence[tuple[str, Plot]]) -> None:
    """Draws the bar charts below each other, each under the words for its setting."""
    check_name(path)
    text = draw([(setting, plot) for setting, plot in charts if isinstance(plot, Bars)])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the plot to {path}: {error.strerror}") from error


def check_name(path: Path) -> None:
    if path.suffix != ".svg":
        raise ConfigError(f"plot: the file name must end in .svg, got {path}")


def draw(charts: Sequence[tuple[str, Bars]]) -> str:
    parts, top = [], 0
    for setting, bars in charts:
        parts.append(f'<g transform="translate(0,{top})">{_chart(setting, bars)}</g>')
        top += HEAD + ROW * len(bars.traces) + FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" '
        f'viewBox="0 0 {WIDTH} {top}"><style>{STYLE}</style>'
        f'<rect width="{WIDTH}" height="{top}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _chart(setting: str, bars: Bars) -> str:
    most = min(max(bar.total for bar in bars.traces), bars.cut or float("inf")) or 1.0
    scale = (WIDTH - LABEL - VALUE) / most
    bottom = HEAD + ROW * len(bars.traces)
    words = [
        _text(12, 24, bars.title, "title"),
        _text(12, 43, setting),
        _text(12, 61, bars.caption, "quiet"),
        _text(LABEL, bottom + 34, bars.x.label, "quiet"),
    ]
    lines = [_tick(LABEL + scale * tick, bottom, human.goal(tick)) for tick in ticks(most, 6)]
    rows = [_row(bar, HEAD + ROW * i, scale, most) for i, bar in enumerate(bars.traces)]
    return "".join(words + lines + rows)


def _row(bar: Bar, top: float, scale: float, most: float) -> str:
    length = scale * min(bar.total, most)
    label = f'<text x="{LABEL - 8}" y="{top + 12}" text-anchor="end">{escape(bar.label)}</text>'
    rect = f'<rect class="bar" x="{LABEL}" y="{top + 1}" width="{length:.1f}" height="{BAR}"/>'
    end = LABEL + length
    # Two slanted gaps near the end: this bar goes on.
    gaps = [f'<path class="gap" d="M{end - x:.1f},{top + BAR + 3}l5,-18"/>' for x in (24, 17)]
    value = " ".join(filter(None, [human.digits(bar.total), bar.note and f"({bar.note})"]))
    cut = "".join(gaps) if bar.total > most else ""
    return label + rect + cut + _text(end + 7, top + 12, value)


def _tick(x: float, bottom: float, text: str) -> str:
    line = f'<path class="line" d="M{x:.1f},{HEAD - 4}V{bottom}"/>'
    return f'{line}<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{escape(text)}</text>'
