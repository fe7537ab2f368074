"""Records of predicted steps: their common setting, reading them, and terminal tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from gradwire.bench import human
from gradwire.bench.records.files import read_kinds
from gradwire.bench.records.schema import FORECAST, KINDS, OTHERS, ForecastRecord
from gradwire.perfmodel.predict import Prediction


@dataclass(frozen=True)
class Setting:
    """The fields that all records of a run have in common."""

    workload: str
    parameters: int
    rate: str | None
    latency_ms: float | None
    device: str
    command: str
    machine: dict[str, str]

    def record(
        self, spec: str, exchange: str, workers: int, prediction: Prediction
    ) -> ForecastRecord:
        ms = {f"{name[:-2]}_ms": 1e3 * s for name, s in prediction.times._asdict().items()}
        return ForecastRecord(
            spec=spec,
            exchange=exchange,
            workers=workers,
            sent_bytes=prediction.sent_bytes,
            calls=prediction.calls,
            **ms,
            **vars(self),
        )


def read_predictions(path: Path) -> list[ForecastRecord]:
    """Reads the forecast records of a file that may hold other records, too."""
    others = [kind for kind in (*KINDS, *OTHERS) if kind != FORECAST]
    return read_kinds(path, {FORECAST: ForecastRecord}, others)


_COLUMNS = ("method", "workers", "exchange", "step", "compute", "encode", "wire", "decode")


def prediction_table(records: Sequence[ForecastRecord]) -> Table:
    """Returns a table of predictions, one row per record."""
    table = _new_table("Predicted step", (*_COLUMNS, "sent", "calls"), words=3)
    for r in records:
        times = (r.step_ms, r.compute_ms, r.encode_ms, r.wire_ms, r.decode_ms)
        _add_row(
            table,
            (r.spec, str(r.workers), r.exchange),
            (*map(human.duration_ms, times), human.byte_size(r.sent_bytes), f"{r.calls:g}"),
        )
    return table


def scaling_table(records: Sequence[ForecastRecord]) -> Table:
    """Returns a table of the bytes that one worker sends in a step, by number of workers."""
    workers = sorted({r.workers for r in records})
    table = _new_table("Sent per step and worker", ("method", *map(str, workers)), words=1)
    sent = {(r.spec, r.workers): r.sent_bytes for r in records}
    for spec in dict.fromkeys(r.spec for r in records):
        _add_row(table, (spec,), tuple(human.byte_size(sent.get((spec, n))) for n in workers))
    return table


def validation_table(records: Sequence[ForecastRecord]) -> Table:
    """Returns a table of predicted and measured steps."""
    columns = ("method", "rate", "workers", "predicted", "measured", "off by")
    beside = ("others' cores", "predicted beside them")
    table = _new_table("Predicted and measured step", (*columns, *beside), words=2)
    for r in records:
        _add_row(
            table,
            (r.spec, human.rate(r.rate or "unshaped")),
            (
                str(r.workers),
                human.duration_ms(r.step_ms),
                human.duration_ms(r.measured_ms),
                human.NO_VALUE if r.prediction_error is None else f"{r.prediction_error:+.0%}",
                human.digits(r.others_cores),
                human.duration_ms(r.beside_others_ms),
            ),
        )
    return table


def _new_table(title: str, columns: Sequence[str], words: int) -> Table:
    table = Table(title=Text(title), title_justify="left", pad_edge=False, box=None)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < words else "right", no_wrap=True)
    return table


def _add_row(table: Table, words: Sequence[str], numbers: Sequence[str]) -> None:
    table.add_row(*(Text(text) for text in (*words, *numbers)))
