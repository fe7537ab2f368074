"""The report's parts as HTML; all text from records is escaped here.

`provenance` lists failures, machines and the exact commands of the records.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape

from gradwire.bench.records.compare import group
from gradwire.bench.records.files import finite
from gradwire.bench.records.schema import (
    BASELINE,
    AnyRecord,
    FaultRecord,
    FollowRecord,
    FuzzRecord,
    KernelRecord,
    StepRecord,
    TrainRecord,
)
from gradwire.bench.report.grid import Cell, Grid, Row
from gradwire.bench.report.plotdata import Plot

LONGEST_NUMBER = 30
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(ms|s|min|h|[kMGT]?B|[kMGT]bit/s|M|workers?)\b)")


def heading(text: str) -> str:
    return f"<h2>{prose(text)}</h2>"


def table(grid: Grid) -> str:
    heads = "".join(
        f'<th scope="col"><button type="button">{escape(_unbroken(name))}</button></th>'
        for name in grid.columns
    )
    rows = "\n".join(map(_row if grid.methods else _plain_row, grid.rows))
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


def figures(plots: Sequence[Plot], first: int) -> str:
    """Renders empty charts that the script fills, numbered from `first`."""
    items = "\n".join(
        f'<figure data-plot="{number}"><figcaption>{escape(plot.title)}</figcaption>'
        f"<p>{escape(plot.caption)}</p>"
        '<div class="tools"></div><div class="canvas"></div></figure>'
        for number, plot in enumerate(plots, start=first)
    )
    return f'<div class="charts">{items}</div>'


def timelines(records: Sequence[TrainRecord | FollowRecord]) -> str:
    """Renders the decisions of controllers: first step, setting and reason of each."""
    controlled = [record for record in records if record.timeline]
    if not controlled:
        return ""
    return '<p class="title">Decisions of the controllers</p>' + "".join(map(_timeline, controlled))


def data(specs: Sequence[str], plots: Sequence[Plot]) -> str:
    """Renders the page's JSON; "<" is escaped, so no record can end the script element."""
    # Dense comes first, in dark grey; the others take the colours in order of appearance.
    others = [spec for spec in specs if spec != BASELINE]
    methods = [{"spec": BASELINE, "baseline": True, "order": 0}] if BASELINE in specs else []
    methods += [{"spec": s, "baseline": False, "order": i} for i, s in enumerate(others)]
    page = {"methods": methods, "plots": [finite(asdict(plot)) for plot in plots]}
    text = json.dumps(page, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def prose(text: str) -> str:
    """Escapes text, and keeps numbers and units on one line."""
    return _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", escape(text))


def _unbroken(name: str) -> str:
    """Returns a heading that may wrap between words but not at a hyphen."""
    return name.replace("-", "\N{NON-BREAKING HYPHEN}")


def _row(row: Row) -> str:
    stopped = "" if row.status == "done" else ' class="stopped"'
    # On a phone a long spec wraps after its method, not in the middle of a number.
    spec = escape(row.spec).replace(":", ":<wbr>")
    cells = "".join(_cell(cell) for cell in row.cells[1:])
    return (
        f'<tr data-spec="{escape(row.spec)}"{stopped}>'
        f'<td class="spec" data-key="{escape(row.spec)}">{spec}</td>{cells}</tr>'
    )


def _plain_row(row: Row) -> str:
    stopped = "" if row.status == "done" else ' class="stopped"'
    return f"<tr{stopped}>{''.join(map(_cell, row.cells))}</tr>"


def _cell(cell: Cell) -> str:
    key = "" if finite(cell.key) is None else f' data-key="{escape(str(cell.key))}"'
    # A number stays on one line; longer text may wrap.
    words = ' class="words"' if len(cell.text) > LONGEST_NUMBER else ""
    return f"<td{words}{key}>{escape(cell.text)}</td>"


def _timeline(record: TrainRecord | FollowRecord) -> str:
    seed = f", seed {record.seed}" if isinstance(record, TrainRecord) else ""
    rows = "".join(
        f"<tr><td>{change.step:,}</td><td>{escape(change.setting)}</td>"
        f"<td>{prose(change.reason)}</td></tr>"
        for change in record.timeline
    )
    return (
        f"<details><summary><code>{escape(record.spec)}</code>{seed}: "
        f"{len(record.timeline)} decision{'s' if len(record.timeline) > 1 else ''}</summary>"
        '<div class="scroll" tabindex="0"><table class="timeline"><thead><tr><th>from step</th>'
        f"<th>setting</th><th>why</th></tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


MOST_NAMES = 12
"""Methods of one command or machine that are listed by name; the rest is counted."""


def provenance(records: Sequence[AnyRecord]) -> str:
    # A fault is part of a job, whose record has the machine and the command.
    measured = [record for record in records if not isinstance(record, FaultRecord)]
    machines = group(measured, lambda record: tuple(record.machine.items()))
    commands = group((r for r in measured if r.command), lambda record: record.command)
    several = len(machines) > 1
    facts = [
        _facts(machine) + (_names([r.spec for r in own]) if several else "")
        for machine, own in machines.items()
    ]
    lines = [_command(command, [r.spec for r in own]) for command, own in commands.items()]
    return (
        f'<section id="runs"><h2>How this was measured</h2>{_counts(records)}'
        + _part("Failures", list(_failures(records)))
        + _part("Machines" if several else "Machine", facts)
        + _part("Commands" if len(lines) > 1 else "Command", lines)
        + "</section>"
    )


def _counts(records: Sequence[AnyRecord]) -> str:
    kinds = Counter(record.kind for record in records)
    counts = ", ".join(f"{number:,} of kind {kind}" for kind, number in kinds.items())
    return f'<p class="note">{len(records):,} records: {counts}.</p>'


MOST_ITEMS = 5
"""Failures, machines or commands that are shown at once; more of them are folded."""


def _part(heading: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    content = "".join(items)
    if len(items) > MOST_ITEMS:
        content = f"<details><summary>all {len(items):,}</summary>{content}</details>"
    return f"<h3>{heading}</h3>{content}"


def _failures(records: Sequence[AnyRecord]) -> Iterator[str]:
    """Renders failures; interrupted runs are counted in the summaries of their settings."""
    for record in records:
        if isinstance(record, TrainRecord | StepRecord | KernelRecord) and (
            record.error and record.status != "interrupted"
        ):
            yield _failure(record.spec, record.status, record.error)
        if isinstance(record, FuzzRecord) and record.crashes:
            yield _failure(record.spec, "crashed", "\n".join(record.crash_texts))


def _failure(spec: str, status: str, error: str) -> str:
    return (
        f'<div class="run"><code>{escape(spec)}</code> {escape(status)}'
        f'<pre class="error">{escape(error)}</pre></div>'
    )


def _facts(machine: tuple[tuple[str, str], ...]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in machine)
    return f"<dl>{rows}</dl>"


def _command(command: str, specs: Sequence[str]) -> str:
    return f'<div class="run">{_names(specs)}<pre>{escape(command)}</pre></div>'


def _names(specs: Sequence[str]) -> str:
    names = [f"<code>{escape(spec)}</code>" for spec in dict.fromkeys(specs)]
    left = len(names) - MOST_NAMES
    # "and 1 others" would take as much space as the name.
    shown = [*names[:MOST_NAMES], f"and {left} others"] if left > 1 else names
    return f"<p>{', '.join(shown)}</p>"
