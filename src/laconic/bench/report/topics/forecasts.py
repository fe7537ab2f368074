"""Predicted steps, beside what was measured where it was, and how they grow with the workers."""

from collections.abc import Sequence
from statistics import median

from laconic.bench import human
from laconic.bench.records.forecasts import ForecastRecord
from laconic.bench.records.kinds import AnyRecord
from laconic.bench.records.setting import group
from laconic.bench.report.cells import count, grid_of, ms, word
from laconic.bench.report.grid import Cell
from laconic.bench.report.plotdata import Axis, Curve, Curves
from laconic.bench.report.section import Section


def sections(records: Sequence[AnyRecord]) -> list[Section]:
    """One for each workload, device and kind of link."""
    found = (record for record in records if isinstance(record, ForecastRecord))
    alike = group(
        found, lambda r: (r.workload, r.parameters, r.rate, r.latency_ms, r.device, r.command)
    )
    return [_section(rows) for rows in alike.values()]


def _section(records: Sequence[ForecastRecord]) -> Section:
    several = len({record.workers for record in records}) > 1
    return Section(
        f"Predicted steps: {_words(records[0])}",
        _summary(records),
        grid_of(_columns(records), methods=True),
        (_plot(records),) if several else (),
    )


def _words(record: ForecastRecord) -> str:
    rate = "links as probed" if record.rate is None else f"links of {human.rate(record.rate)}"
    latency = "" if record.latency_ms is None else f" and {record.latency_ms:g} ms"
    device = "" if record.device == "cpu" else f"{record.device}, "
    return f"{record.workload}, {device}{rate}{latency}"


def _summary(records: Sequence[ForecastRecord]) -> str:
    offs = [abs(record.off) for record in records if record.off is not None]
    if not offs:
        return "Computed from a model of the links; nothing here was timed on a cluster."
    return (
        f"Half of {len(offs)} predictions are within {median(offs):.0%} of what was measured, "
        f"all within {max(offs):.0%}."
    )


def _columns(records: Sequence[ForecastRecord]) -> dict[str, list[Cell]]:
    columns = {
        "method": [word(r.spec) for r in records],
        "workers": [count(r.workers) for r in records],
        "predicted": [ms(r.step_ms) for r in records],
        "measured": [ms(r.measured_ms) for r in records],
        "off by": [
            Cell(human.NOTHING if r.off is None else f"{r.off:+.0%}", r.off) for r in records
        ],
        "exchange": [word(r.exchange) for r in records],
        "compute": [ms(r.compute_ms) for r in records],
        "encode": [ms(r.encode_ms) for r in records],
        "wire": [ms(r.wire_ms) for r in records],
        "decode": [ms(r.decode_ms) for r in records],
        "sent per step": [Cell(human.byte_size(r.sent_bytes), r.sent_bytes) for r in records],
        "risk": [word(r.risk or human.NOTHING) for r in records],
        "advised": [word("yes" if r.advised else human.NOTHING) for r in records],
    }
    untold = {
        "measured": all(r.measured_ms is None for r in records),
        "off by": all(r.measured_ms is None for r in records),
        "risk": all(r.risk is None for r in records),
        "advised": not any(r.advised for r in records),
    }
    return {name: cells for name, cells in columns.items() if not untold.get(name)}


def _plot(records: Sequence[ForecastRecord]) -> Curves:
    lines = group(records, lambda record: record.spec)
    return Curves(
        place=1,
        title="Predicted step by number of workers",
        caption="Further down is better.",
        x=Axis(name="workers", label="workers", log=True),
        y=Axis(name="time", label="step time", unit="ms", log=True, rises=True),
        traces=tuple(_curve(spec, own) for spec, own in lines.items()),
    )


def _curve(spec: str, records: Sequence[ForecastRecord]) -> Curve:
    places = sorted(records, key=lambda record: record.workers)
    return Curve(
        spec=spec,
        label=spec,
        x=tuple(float(record.workers) for record in places),
        y=tuple(record.step_ms for record in places),
        step=tuple(record.workers for record in places),
    )
