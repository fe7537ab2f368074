"""The top of the report, and its order: summaries of few sections, or a table of folded groups."""

from collections.abc import Sequence
from html import escape

from gradwire.bench import human
from gradwire.bench.records.compare import group
from gradwire.bench.report.markup import prose
from gradwire.bench.report.section import Section, methods_of

MOST_SECTIONS = 8
"""A page with more sections than this is folded."""


def lead(sections: Sequence[Section]) -> str:
    """Renders the summary: a sentence, a list with links to the sections, or a table of groups."""
    if len(sections) == 1:
        return f'<p class="lead">{prose(sections[0].summary)}</p>'
    if len(sections) > MOST_SECTIONS:
        return _table(sections)
    return _summaries(list(enumerate(sections)))


def legend(sections: Sequence[Section]) -> str:
    """Renders the place of the legend; that of a long page would fill the screen."""
    place = '<nav class="legend" aria-label="Methods: click to hide or show"></nav>'
    if len(sections) <= MOST_SECTIONS:
        return place
    names = len(methods_of(sections))
    words = f"Hide or show some of {names} methods"
    return f'<details class="methods"><summary>{words}</summary>{place}</details>'


def body(sections: Sequence[Section], parts: Sequence[str]) -> str:
    """Joins the rendered sections; those of a long page are folded by group."""
    if len(sections) <= MOST_SECTIONS:
        return "\n".join(parts)
    return "\n".join(
        f'<details class="group" id="g{number}"><summary>{prose(name)}'
        f"<span>{_settings(own)}</span></summary>{_summaries(own)}"
        f"{''.join(parts[index] for index, _ in own)}</details>"
        for number, (name, own) in enumerate(_groups(sections).items())
    )


def _groups(sections: Sequence[Section]) -> dict[str, list[tuple[int, Section]]]:
    return group(enumerate(sections), lambda item: item[1].group)


def _summaries(sections: Sequence[tuple[int, Section]]) -> str:
    items = "".join(
        f'<li><a href="#s{index}">{prose(section.heading)}</a>: {prose(section.summary)}</li>'
        for index, section in sections
    )
    return f"<ul>{items}</ul>"


def _table(sections: Sequence[Section]) -> str:
    """Renders one row per group: settings, runs, interrupted ones, and the gain over dense."""
    heads = ("group", "dense over fastest", "settings", "rows", "interrupted")
    titles = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    rows = "".join(
        f'<tr><td class="words"><a href="#g{number}">{prose(name)}</a></td>{_cells(own)}</tr>'
        for number, (name, own) in enumerate(_groups(sections).items())
    )
    return (
        '<p class="note">Dense over fastest: the time of dense training over that of the fastest '
        "other method, to the target that all runs share, or of a step if they share none.</p>"
        '<div class="scroll" tabindex="0"><table class="overview">'
        f"<thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cells(own: Sequence[tuple[int, Section]]) -> str:
    rows = [row for _, section in own for row in section.grid.rows]
    stopped = sum(row.status == "interrupted" for row in rows)
    gains = sorted(section.gain for _, section in own if section.gain is not None)
    gain = _span(gains)
    if 0 < len(gains) < len(own):
        gain += f" in {len(gains)} of {len(own)}"
    texts = (gain, f"{len(own)}", f"{len(rows):,}", f"{stopped:,}" if stopped else "")
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def _span(gains: Sequence[float]) -> str:
    if not gains:
        return human.NO_VALUE
    low, high = human.times(gains[0]), human.times(gains[-1])
    return low if low == high else f"{low} to {high}"


def _settings(own: Sequence[tuple[int, Section]]) -> str:
    return f"{len(own)} setting{'s' if len(own) > 1 else ''}"
