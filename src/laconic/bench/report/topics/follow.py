"""Training on links that change their rate: the step at every rate, and who followed."""

from collections.abc import Sequence

from laconic.bench import human
from laconic.bench.records.follow import FollowRecord, Phase
from laconic.bench.records.kinds import AnyRecord
from laconic.bench.records.setting import group
from laconic.bench.report.cells import count, grid_of, ms, seconds, word
from laconic.bench.report.grid import Cell
from laconic.bench.report.plotdata import Axis, Curve, Curves, Mark
from laconic.bench.report.section import Section


def sections(records: Sequence[AnyRecord]) -> list[Section]:
    """One for each workload, number of workers and sequence of rates."""
    found = (record for record in records if isinstance(record, FollowRecord))
    alike = group(found, lambda r: (r.workload, r.workers, tuple(p.rate for p in r.phases)))
    return [_section(rows) for rows in alike.values()]


def _section(records: Sequence[FollowRecord]) -> Section:
    one = records[0]
    rates = ", then ".join(human.rate(phase.rate) for phase in one.phases)
    best = min(records, key=_all_s)
    return Section(
        f"Links that change: {one.workload}, {one.workers} workers, {rates}",
        f"{best.spec} was through first, in {human.duration_s(_all_s(best))}. These are times of "
        "steps; how much a step teaches is another matter.",
        grid_of(_columns([(r, phase) for r in records for phase in r.phases]), methods=True),
        (_plot(records),) if one.phases else (),
        tuple(records),
    )


def _all_s(record: FollowRecord) -> float:
    return sum(phase.seconds for phase in record.phases)


def _columns(rows: Sequence[tuple[FollowRecord, Phase]]) -> dict[str, list[Cell]]:
    columns = {
        "method": [word(record.spec) for record, _ in rows],
        "links": [word(human.rate(phase.rate)) for _, phase in rows],
        "settled step": [ms(phase.settled_ms) for _, phase in rows],
        "time": [seconds(phase.seconds) for _, phase in rows],
        "from step": [count(phase.first) for _, phase in rows],
        "steps": [count(phase.steps) for _, phase in rows],
        "settled on": [word(phase.setting or human.NOTHING) for _, phase in rows],
    }
    if all(phase.setting is None for _, phase in rows):
        del columns["settled on"]
    return columns


def _plot(records: Sequence[FollowRecord]) -> Curves:
    return Curves(
        place=1,
        title="Step time while the links change",
        caption="Where steps settled at each rate: the median of the second half of them.",
        x=Axis(name="step", label="step"),
        y=Axis(name="time", label="step time", unit="ms", log=True, rises=True),
        traces=tuple(_curve(record) for record in records),
        marks=tuple(Mark(label=human.rate(p.rate), x=p.first) for p in records[0].phases),
    )


def _curve(record: FollowRecord) -> Curve:
    """A level line for each phase."""
    ends = [(p.first + at, p.settled_ms) for p in record.phases for at in (0, p.steps)]
    return Curve(
        spec=record.spec,
        label=record.spec,
        x=tuple(float(step) for step, _ in ends),
        y=tuple(time_ms for _, time_ms in ends),
        step=tuple(step for step, _ in ends),
    )
