"""What choosing at two factors costs, in two levels and by choosing twice."""

from collections.abc import Sequence

from laconic.bench.records.kinds import AnyRecord
from laconic.bench.records.levels import LevelsRecord
from laconic.bench.records.setting import group
from laconic.bench.report.cells import count, grid_of, ms, ratio, word
from laconic.bench.report.section import Section


def sections(records: Sequence[AnyRecord]) -> list[Section]:
    """One for each device, its kernels and a pair of factors."""
    found = (record for record in records if isinstance(record, LevelsRecord))
    alike = group(found, lambda r: (r.device, r.backend, r.factors))
    return [_section(rows) for rows in alike.values()]


def _section(records: Sequence[LevelsRecord]) -> Section:
    one, ratios = records[0], [record.ratio for record in records]
    low, high = one.factors
    columns = {
        "method": [word(r.spec) for r in records],
        "elements": [count(r.numel) for r in records],
        "in two levels": [ms(r.two_levels_us / 1e3) for r in records],
        "twice": [ms(r.twice_us / 1e3) for r in records],
        "twice / two levels": [ratio(r.ratio) for r in records],
        "timed by": [word("CUDA graph" if r.by == "graph" else "calls") for r in records],
    }
    if all(record.by == "eager" for record in records):
        del columns["timed by"]
    return Section(
        f"Two levels of a sparsifier, factors {low:g} and {high:g}, on {one.device}, "
        f"{one.backend} kernels",
        f"Choosing twice takes {min(ratios):.2f} to {max(ratios):.2f} times what it takes to "
        "choose the second time among what was chosen first.",
        grid_of(columns),
    )
