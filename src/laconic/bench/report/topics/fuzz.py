"""What became of hostile and broken messages: a row a run, and one for each method that crashed."""

from collections.abc import Sequence

from laconic.bench.records.fuzz import FuzzRecord
from laconic.bench.records.kinds import AnyRecord
from laconic.bench.records.setting import group
from laconic.bench.report.cells import count, grid_of, seconds, word
from laconic.bench.report.grid import Cell
from laconic.bench.report.section import Section


def sections(records: Sequence[AnyRecord]) -> list[Section]:
    found = [record for record in records if isinstance(record, FuzzRecord)]
    return [_section(found)] if found else []


def _section(records: Sequence[FuzzRecord]) -> Section:
    runs = list(group(records, lambda r: (r.command, r.seed)).values())
    crashed = [[record] for record in records if record.crashes]
    rows = [*runs, *crashed]
    columns = {
        "sent to": [_whom(run) for run in runs] + [word(r.spec) for [r] in crashed],
        "seed": [count(row[0].seed) for row in rows],
        "messages": [count(sum(r.messages for r in row)) for row in rows],
        "decoded": [count(sum(r.decoded for r in row)) for row in rows],
        "refused": [count(sum(r.refused for r in row)) for row in rows],
        "crashes": [count(sum(r.crashes for r in row)) for row in rows],
        "processor": [seconds(sum(r.cpu_s for r in row)) for row in rows],
        "status": [_status(row) for row in rows],
    }
    return Section("Hostile bytes", _summary(records), grid_of(columns, [_sound(r) for r in rows]))


def _whom(records: Sequence[FuzzRecord]) -> Cell:
    settings = len(records)
    return Cell(f"{settings:,} setting{'s' if settings > 1 else ''}", settings)


def _sound(records: Sequence[FuzzRecord]) -> bool:
    return not any(record.crashes for record in records)


def _status(records: Sequence[FuzzRecord]) -> Cell:
    return word("sound" if _sound(records) else "crashed")


def _summary(records: Sequence[FuzzRecord]) -> str:
    crashes, names = sum(r.crashes for r in records), {_name(r.spec) for r in records}
    whom = f"{len(names)} methods" if len(names) > 1 else names.pop()
    messages = f"{sum(r.messages for r in records):,} hostile or broken messages to {whom}"
    if crashes:
        return f"Of {messages}, {crashes:,} made something crash."
    return f"Each of {messages} was read or refused."


def _name(spec: str) -> str:
    """The method of a setting, or the first of a pipeline."""
    return spec.partition(":")[0].partition(" ")[0]
