"""Forecasts as tables for a terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from laconic.bench import human
from laconic.bench.records.forecasts import ForecastRecord

_COLUMNS = ("method", "workers", "exchange", "step", "compute", "encode", "wire", "decode")


def forecast_table(records: Sequence[ForecastRecord]) -> Table:
    """What is predicted, row by row."""
    table = _table("Predicted step", (*_COLUMNS, "sent", "calls"), words=3)
    for r in records:
        times = (r.step_ms, r.compute_ms, r.encode_ms, r.wire_ms, r.decode_ms)
        _add(
            table,
            (r.spec, str(r.workers), r.exchange),
            (*map(human.duration_ms, times), human.byte_size(r.sent_bytes), f"{r.calls:g}"),
        )
    return table


def scaling_table(records: Sequence[ForecastRecord]) -> Table:
    """Bytes that one worker sends in a step, for every number of workers."""
    workers = sorted({r.workers for r in records})
    table = _table("Sent per step and worker", ("method", *map(str, workers)), words=1)
    sent = {(r.spec, r.workers): r.sent_bytes for r in records}
    for spec in dict.fromkeys(r.spec for r in records):
        _add(table, (spec,), tuple(human.byte_size(sent.get((spec, n))) for n in workers))
    return table


def validation_table(records: Sequence[ForecastRecord]) -> Table:
    """What was predicted beside what was measured."""
    columns = ("method", "rate", "workers", "predicted", "measured", "off by")
    beside = ("others' cores", "predicted beside them")
    table = _table("Predicted and measured step", (*columns, *beside), words=2)
    for r in records:
        _add(
            table,
            (r.spec, human.rate(r.rate or "unshaped")),
            (
                str(r.workers),
                human.duration_ms(r.step_ms),
                human.duration_ms(r.measured_ms),
                human.NOTHING if r.off is None else f"{r.off:+.0%}",
                human.digits(r.others_cores),
                human.duration_ms(r.beside_others_ms),
            ),
        )
    return table


def _table(title: str, columns: Sequence[str], words: int) -> Table:
    table = Table(title=Text(title), title_justify="left", pad_edge=False, box=None)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < words else "right", no_wrap=True)
    return table


def _add(table: Table, words: Sequence[str], numbers: Sequence[str]) -> None:
    table.add_row(*(Text(text) for text in (*words, *numbers)))
