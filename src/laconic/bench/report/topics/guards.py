"""What guards make of a step, beside what they may make of it."""

from collections.abc import Sequence

from laconic.bench.records.guards import GuardRecord
from laconic.bench.records.kinds import AnyRecord
from laconic.bench.records.setting import Links, group
from laconic.bench.report.cells import count, grid_of, ms, ratio, word
from laconic.bench.report.grid import Cell
from laconic.bench.report.section import Section


def sections(records: Sequence[AnyRecord]) -> list[Section]:
    """One for each workload and cluster."""
    found = (record for record in records if isinstance(record, GuardRecord))
    alike = group(found, lambda r: (r.workload, Links(r.workers, r.rate, r.shaped)))
    return [_section(f"{name}, {on.words()}", rows) for (name, on), rows in alike.items()]


def _section(setting: str, records: Sequence[GuardRecord]) -> Section:
    within = [record.ratio <= record.limit for record in records]
    columns = {
        "method": [word(r.spec) for r in records],
        "guard": [word(r.guard) for r in records],
        "rounds": [count(r.rounds) for r in records],
        "without": [ms(r.without_ms) for r in records],
        "with": [ms(r.with_ms) for r in records],
        "ratio": [ratio(r.ratio, 3) for r in records],
        "quartiles": [_spread(r) for r in records],
        "limit": [ratio(r.limit) for r in records],
        "status": [word("within" if fine else "over") for fine in within],
    }
    return Section(
        f"What guards cost: {setting}",
        f"{sum(within)} of {len(records)} measurements are within their limit, which is for the "
        "median over rounds of a step with the guard to one without.",
        grid_of(columns, within),
    )


def _spread(record: GuardRecord) -> Cell:
    low, high = record.quartiles
    return Cell(f"{low:.3f} – {high:.3f}", high - low)  # noqa: RUF001  a range takes an en dash
