"""Steps of a Keras model, against the first method of their run."""

from collections.abc import Sequence

from laconic.bench import human
from laconic.bench.records.keras import KerasRecord
from laconic.bench.records.kinds import AnyRecord
from laconic.bench.records.setting import Links, group
from laconic.bench.report.cells import grid_of, ms, ratio, word
from laconic.bench.report.grid import Cell
from laconic.bench.report.section import Section


def sections(records: Sequence[AnyRecord]) -> list[Section]:
    """One for each size and cluster."""
    found = (record for record in records if isinstance(record, KerasRecord))
    alike = group(found, lambda r: (r.hidden, r.batch, r.workers, r.rate))
    return [_section(rows) for rows in alike.values()]


def _section(records: Sequence[KerasRecord]) -> Section:
    one, best = records[0], min(records, key=lambda record: record.step_ms)
    columns = {
        "method": [word(r.spec) for r in records],
        "step": [ms(r.step_ms) for r in records],
        "ratio": [ratio(r.ratio) for r in records],
        "against": [word(r.against) for r in records],
        "sent per step": [Cell(human.byte_size(r.sent_bytes), r.sent_bytes) for r in records],
    }
    on = Links(one.workers, one.rate, one.rate is not None).words()
    return Section(
        f"Keras steps: hidden layers of {one.hidden:,}, batch {one.batch}, {on}",
        f"{best.spec} has the shortest step, {human.duration_ms(best.step_ms)}.",
        grid_of(columns),
    )
