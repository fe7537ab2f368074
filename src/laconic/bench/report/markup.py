"""Pieces of the report as HTML; everything that comes from a record is escaped here."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from laconic.bench.records.jsonl import finite
from laconic.bench.records.kinds import BASELINE, Record, TrainRecord
from laconic.bench.records.setting import group
from laconic.bench.report.grid import Cell, Grid, Row
from laconic.bench.report.plotdata import Plot

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(ms|s|min|h|[kMGT]?B|[kMGT]bit/s|M|workers?)\b)")


def lead(sections: Sequence[tuple[str, str]]) -> str:
    """The summary; for several settings a list of summaries that leads to each section."""
    if len(sections) == 1:
        return f'<p class="lead">{prose(sections[0][1])}</p>'
    items = "".join(
        f'<li><a href="#s{index}">{prose(heading)}</a>: {prose(summary)}</li>'
        for index, (heading, summary) in enumerate(sections)
    )
    return f"<ul>{items}</ul>"


def heading(text: str) -> str:
    return f"<h2>{prose(text)}</h2>"


def table(grid: Grid) -> str:
    heads = "".join(
        f'<th scope="col"><button type="button">{escape(_unbroken(name))}</button></th>'
        for name in grid.columns
    )
    rows = "\n".join(map(_row, grid.rows))
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


def figures(plots: Sequence[Plot], first: int) -> str:
    """Empty charts for the script to draw, numbered from `first`."""
    items = "\n".join(
        f'<figure data-plot="{number}"><h3>{escape(plot.title)}</h3><p>{escape(plot.caption)}</p>'
        '<div class="tools"></div><div class="canvas"></div></figure>'
        for number, plot in enumerate(plots, start=first)
    )
    return f'<div class="charts">{items}</div>'


def timelines(records: Sequence[Record]) -> str:
    """What controllers decided: which setting from which step on, and why."""
    steered = [r for r in records if isinstance(r, TrainRecord) and r.timeline]
    if not steered:
        return ""
    return "<h3>What the controllers decided</h3>" + "".join(map(_timeline, steered))


def runs(records: Sequence[Record]) -> str:
    """Where the numbers come from: what went wrong, the machines, and the exact commands."""
    failures = "".join(_failure(record) for record in records if record.error)
    machines = group(records, lambda record: tuple(record.machine.items()))
    commands = group(records, lambda record: record.command)
    return (
        '<section id="runs"><h2>How this was measured</h2>'
        + (f"<h3>What went wrong</h3>{failures}" if failures else "")
        + f"<h3>Machine{'s' if len(machines) > 1 else ''}</h3>"
        + "".join(_machine(facts, made, len(machines) > 1) for facts, made in machines.items())
        + f"<h3>Command{'s' if len(commands) > 1 else ''}</h3>"
        + "".join(_command(command, made) for command, made in commands.items())
        + "</section>"
    )


def data(records: Sequence[Record], plots: Sequence[Plot]) -> str:
    """The page's JSON; no "<" survives, so no record can end the script element."""
    specs = dict.fromkeys(record.spec for record in records)
    # Dense first and in ink; the others take the colours in order of appearance.
    others = [spec for spec in specs if spec != BASELINE]
    methods = [{"spec": BASELINE, "baseline": True, "order": 0}] if BASELINE in specs else []
    methods += [{"spec": s, "baseline": False, "order": i} for i, s in enumerate(others)]
    page = {"methods": methods, "plots": [finite(asdict(plot)) for plot in plots]}
    text = json.dumps(page, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def prose(text: str) -> str:
    """Text in which no line breaks between a number and its unit."""
    return _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", escape(text))


def _unbroken(name: str) -> str:
    """A heading that may wrap between words but not at a hyphen."""
    return name.replace("-", "\N{NON-BREAKING HYPHEN}")


def _row(row: Row) -> str:
    stopped = "" if row.status == "done" else ' class="stopped"'
    # On a phone a long spec breaks after its method, not in the middle of a number.
    spec = escape(row.spec).replace(":", ":<wbr>")
    cells = "".join(_cell(cell) for cell in row.cells[1:])
    return (
        f'<tr data-spec="{escape(row.spec)}"{stopped}>'
        f'<td class="spec" data-key="{escape(row.spec)}">{spec}</td>{cells}</tr>'
    )


def _cell(cell: Cell) -> str:
    key = "" if finite(cell.key) is None else f' data-key="{escape(str(cell.key))}"'
    return f"<td{key}>{escape(cell.text)}</td>"


def _failure(record: Record) -> str:
    return (
        f'<div class="run"><code>{escape(record.spec)}</code> {escape(record.status)}'
        f'<pre class="error">{escape(record.error or "")}</pre></div>'
    )


def _timeline(record: TrainRecord) -> str:
    rows = "".join(
        f"<tr><td>{change.step:,}</td><td>{escape(change.setting)}</td>"
        f"<td>{prose(change.reason)}</td></tr>"
        for change in record.timeline
    )
    return (
        f"<details><summary><code>{escape(record.spec)}</code>, seed {record.seed}: "
        f"{len(record.timeline)} decision{'s' if len(record.timeline) > 1 else ''}</summary>"
        '<div class="scroll" tabindex="0"><table class="timeline"><thead><tr><th>from step</th>'
        f"<th>setting</th><th>why</th></tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _machine(facts: tuple[tuple[str, str], ...], made: Sequence[Record], several: bool) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f"<dl>{rows}</dl>" + (_made(made) if several else "")


def _command(command: str, made: Sequence[Record]) -> str:
    return f'<div class="run">{_made(made)}<pre>{escape(command)}</pre></div>'


def _made(records: Sequence[Record]) -> str:
    specs = dict.fromkeys(record.spec for record in records)
    return "<p>" + ", ".join(f"<code>{escape(spec)}</code>" for spec in specs) + "</p>"
