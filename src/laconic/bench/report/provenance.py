"""Where the numbers come from, as HTML: what went wrong, the machines, and the exact commands."""

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

from laconic.bench.records.chaos import KillRecord
from laconic.bench.records.fuzz import FuzzRecord
from laconic.bench.records.kinds import AnyRecord, KernelRecord, StepRecord, TrainRecord
from laconic.bench.records.setting import group

MOST_NAMES = 12
"""More methods of one command or machine are counted, not named."""


def runs(records: Sequence[AnyRecord]) -> str:
    # A kill is part of a job, whose record says where it was made.
    made = [record for record in records if not isinstance(record, KillRecord)]
    machines = group(made, lambda record: tuple(record.machine.items()))
    commands = group((r for r in made if r.command), lambda record: record.command)
    several = len(machines) > 1
    facts = [
        _facts(machine) + (_names([r.spec for r in own]) if several else "")
        for machine, own in machines.items()
    ]
    lines = [_command(command, [r.spec for r in own]) for command, own in commands.items()]
    return (
        f'<section id="runs"><h2>How this was measured</h2>{_counts(records)}'
        + _part("What went wrong", list(_failures(records)))
        + _part("Machines" if several else "Machine", facts)
        + _part("Commands" if len(lines) > 1 else "Command", lines)
        + "</section>"
    )


def _counts(records: Sequence[AnyRecord]) -> str:
    kinds = Counter(record.kind for record in records)
    words = ", ".join(f"{number:,} of kind {kind}" for kind, number in kinds.items())
    return f'<p class="note">{len(records):,} records: {words}.</p>'


def _part(heading: str, items: Sequence[str]) -> str:
    return f"<h3>{heading}</h3>{''.join(items)}" if items else ""


def _failures(records: Sequence[AnyRecord]) -> Iterator[str]:
    for record in records:
        if isinstance(record, TrainRecord | StepRecord | KernelRecord) and record.error:
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
    # Who is left out must be more than one, or there would be room for it.
    shown = [*names[:MOST_NAMES], f"and {left} others"] if left > 1 else names
    return f"<p>{', '.join(shown)}</p>"
