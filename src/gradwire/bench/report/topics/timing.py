"""Sections on timing: changing links, predicted steps, two-level selection and Keras steps."""

from collections.abc import Sequence
from statistics import median

from gradwire.bench import human
from gradwire.bench.records.compare import Links, group
from gradwire.bench.records.schema import (
    AnyRecord,
    FollowRecord,
    ForecastRecord,
    KerasRecord,
    LevelsRecord,
    Phase,
)
from gradwire.bench.report.grid import Cell
from gradwire.bench.report.plotdata import Axis, Curve, Curves, Mark
from gradwire.bench.report.section import Section, count, grid_of, ms, ratio, seconds, text_cell


def follow_sections(records: Sequence[AnyRecord]) -> list[Section]:
    """Returns one section per workload, number of workers and sequence of rates."""
    found = (record for record in records if isinstance(record, FollowRecord))
    settings = group(found, lambda r: (r.workload, r.workers, tuple(p.rate for p in r.phases)))
    return [_follow_section(rows) for rows in settings.values()]


def _follow_section(records: Sequence[FollowRecord]) -> Section:
    one = records[0]
    rates = ", then ".join(human.rate(phase.rate) for phase in one.phases)
    best = min(records, key=_total_s)
    return Section(
        f"Changing links: {one.workload}, {one.workers} workers, {rates}",
        f"{best.spec} finished first, in {human.duration_s(_total_s(best))}. This compares step "
        "times only, not the progress of training per step.",
        grid_of(_follow_columns([(r, phase) for r in records for phase in r.phases]), methods=True),
        (_follow_plot(records),) if one.phases else (),
        tuple(records),
    )


def _total_s(record: FollowRecord) -> float:
    return sum(phase.seconds for phase in record.phases)


def _follow_columns(rows: Sequence[tuple[FollowRecord, Phase]]) -> dict[str, list[Cell]]:
    columns = {
        "method": [text_cell(record.spec) for record, _ in rows],
        "links": [text_cell(human.rate(phase.rate)) for _, phase in rows],
        "settled step": [ms(phase.settled_ms) for _, phase in rows],
        "time": [seconds(phase.seconds) for _, phase in rows],
        "from step": [count(phase.first) for _, phase in rows],
        "steps": [count(phase.steps) for _, phase in rows],
        "settled on": [text_cell(phase.setting or human.NO_VALUE) for _, phase in rows],
        "changed after": [_steps_cell(phase.changed_after) for _, phase in rows],
    }
    if all(phase.changed_after is None for _, phase in rows):
        del columns["changed after"]
    if all(phase.setting is None for _, phase in rows):
        del columns["settled on"]
    return columns


def _steps_cell(steps: int | None) -> Cell:
    return text_cell(human.NO_VALUE if steps is None else f"{steps} steps")


def _follow_plot(records: Sequence[FollowRecord]) -> Curves:
    return Curves(
        place=1,
        title="Step time on changing links",
        caption="Settled step time at each rate: the median of the second half of its steps.",
        x=Axis(name="step", label="step"),
        y=Axis(name="time", label="step time", unit="ms", log=True, rises=True),
        traces=tuple(_follow_curve(record) for record in records),
        marks=tuple(Mark(label=human.rate(p.rate), x=p.first) for p in records[0].phases),
    )


def _follow_curve(record: FollowRecord) -> Curve:
    """Makes a horizontal line for each phase."""
    ends = [(p.first + at, p.settled_ms) for p in record.phases for at in (0, p.steps)]
    return Curve(
        spec=record.spec,
        label=record.spec,
        x=tuple(float(step) for step, _ in ends),
        y=tuple(time_ms for _, time_ms in ends),
        step=tuple(step for step, _ in ends),
    )


def forecast_sections(records: Sequence[AnyRecord]) -> list[Section]:
    """Returns one section per workload, device and link."""
    found = (record for record in records if isinstance(record, ForecastRecord))
    settings = group(
        found, lambda r: (r.workload, r.parameters, r.rate, r.latency_ms, r.device, r.command)
    )
    return [_forecast_section(rows) for rows in settings.values()]


def _forecast_section(records: Sequence[ForecastRecord]) -> Section:
    several = len({record.workers for record in records}) > 1
    return Section(
        f"Predicted steps: {_forecast_words(records[0])}, {_numbers(records)} workers",
        _forecast_summary(records),
        grid_of(_forecast_columns(records), methods=True),
        (_forecast_plot(records),) if several else (),
    )


def _forecast_words(record: ForecastRecord) -> str:
    rate = "probed links" if record.rate is None else f"links of {human.rate(record.rate)}"
    latency = "" if record.latency_ms is None else f" and {record.latency_ms:g} ms"
    device = "" if record.device == "cpu" else f"{record.device}, "
    return f"{record.workload}, {device}{rate}{latency}"


def _numbers(records: Sequence[ForecastRecord]) -> str:
    numbers = sorted({record.workers for record in records})
    return " to ".join(f"{number:,}" for number in dict.fromkeys((numbers[0], numbers[-1])))


def _forecast_summary(records: Sequence[ForecastRecord]) -> str:
    errors = [
        abs(record.prediction_error) for record in records if record.prediction_error is not None
    ]
    if not errors:
        return "Computed from a model of the links; nothing here was timed on a cluster."
    return (
        f"Half of {len(errors)} predictions are within {median(errors):.0%} of the measured time, "
        f"all within {max(errors):.0%}."
    )


def _forecast_columns(records: Sequence[ForecastRecord]) -> dict[str, list[Cell]]:
    columns = {
        "method": [text_cell(r.spec) for r in records],
        "workers": [count(r.workers) for r in records],
        "predicted": [ms(r.step_ms) for r in records],
        "measured": [ms(r.measured_ms) for r in records],
        "error": [
            Cell(
                human.NO_VALUE if r.prediction_error is None else f"{r.prediction_error:+.0%}",
                r.prediction_error,
            )
            for r in records
        ],
        "exchange": [text_cell(r.exchange) for r in records],
        "compute": [ms(r.compute_ms) for r in records],
        "encode": [ms(r.encode_ms) for r in records],
        "wire": [ms(r.wire_ms) for r in records],
        "decode": [ms(r.decode_ms) for r in records],
        "sent per step": [Cell(human.byte_size(r.sent_bytes), r.sent_bytes) for r in records],
        "risk": [text_cell(r.risk or human.NO_VALUE) for r in records],
        "advised": [text_cell("yes" if r.advised else human.NO_VALUE) for r in records],
    }
    empty = {
        "measured": all(r.measured_ms is None for r in records),
        "error": all(r.measured_ms is None for r in records),
        "risk": all(r.risk is None for r in records),
        "advised": not any(r.advised for r in records),
    }
    return {name: cells for name, cells in columns.items() if not empty.get(name)}


def _forecast_plot(records: Sequence[ForecastRecord]) -> Curves:
    lines = group(records, lambda record: record.spec)
    return Curves(
        place=1,
        title="Predicted step by number of workers",
        caption="Further down is better.",
        x=Axis(name="workers", label="workers", log=True),
        y=Axis(name="time", label="step time", unit="ms", log=True, rises=True),
        traces=tuple(_forecast_curve(spec, own) for spec, own in lines.items()),
    )


def _forecast_curve(spec: str, records: Sequence[ForecastRecord]) -> Curve:
    points = sorted(records, key=lambda record: record.workers)
    return Curve(
        spec=spec,
        label=spec,
        x=tuple(float(record.workers) for record in points),
        y=tuple(record.step_ms for record in points),
        step=tuple(record.workers for record in points),
    )


def levels_sections(records: Sequence[AnyRecord]) -> list[Section]:
    """Returns one section per device, kernel backend and pair of factors."""
    found = (record for record in records if isinstance(record, LevelsRecord))
    settings = group(found, lambda r: (r.device, r.backend, r.factors))
    return [_levels_section(rows) for rows in settings.values()]


def _levels_section(records: Sequence[LevelsRecord]) -> Section:
    one, ratios = records[0], [record.ratio for record in records]
    low, high = one.factors
    columns = {
        "method": [text_cell(r.spec) for r in records],
        "elements": [count(r.numel) for r in records],
        "in two levels": [ms(r.two_levels_us / 1e3) for r in records],
        "twice": [ms(r.twice_us / 1e3) for r in records],
        "twice / two levels": [ratio(r.ratio) for r in records],
        "timed by": [text_cell("CUDA graph" if r.by == "graph" else "calls") for r in records],
    }
    if all(record.by == "eager" for record in records):
        del columns["timed by"]
    return Section(
        f"Two levels of a sparsifier, factors {low:g} and {high:g}, on {one.device}, "
        f"{one.backend} kernels",
        f"Selecting twice takes {min(ratios):.2f} to {max(ratios):.2f} times as long as selecting "
        "the second time among the entries that were selected first.",
        grid_of(columns),
    )


def keras_sections(records: Sequence[AnyRecord]) -> list[Section]:
    """Returns one section per model size and cluster."""
    found = (record for record in records if isinstance(record, KerasRecord))
    settings = group(found, lambda r: (r.hidden, r.batch, r.workers, r.rate))
    return [_keras_section(rows) for rows in settings.values()]


def _keras_section(records: Sequence[KerasRecord]) -> Section:
    one, best = records[0], min(records, key=lambda record: record.step_ms)
    columns = {
        "method": [text_cell(r.spec) for r in records],
        "step": [ms(r.step_ms) for r in records],
        "ratio": [ratio(r.ratio) for r in records],
        "against": [text_cell(r.against) for r in records],
        "sent per step": [Cell(human.byte_size(r.sent_bytes), r.sent_bytes) for r in records],
    }
    links = Links(one.workers, one.rate, one.rate is not None).words()
    return Section(
        f"Keras steps: hidden layers of {one.hidden:,}, batch {one.batch}, {links}",
        f"{best.spec} has the shortest step, {human.duration_ms(best.step_ms)}.",
        grid_of(columns),
    )
