"""Results as a grid of cells, each with a text and a sort key, for the terminal and for HTML."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.bench import human
from gradwire.bench.records.compare import common_target, speed_up, target_of
from gradwire.bench.records.schema import KernelRecord, Record, StepRecord, TrainRecord


@dataclass(frozen=True)
class Cell:
    """The text of a cell and its sort key; a None key sorts last in both directions."""

    text: str
    key: float | str | None


@dataclass(frozen=True)
class Row:
    spec: str
    status: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Grid:
    """Columns and rows; rows of `methods` have a colour and can be hidden on the page."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    methods: bool = True

    def select(self, *names: str) -> "Grid":
        """Returns the columns with these names, in this order; names without a column are ok."""
        places = [self.columns.index(name) for name in names if name in self.columns]
        rows = (Row(r.spec, r.status, tuple(r.cells[i] for i in places)) for r in self.rows)
        return Grid(tuple(self.columns[i] for i in places), tuple(rows), self.methods)


BOUND_COLUMNS = ("efficiency", "wire at rate", "bound", "step / bound")
"""Columns that compare a step with what its computation and its bytes need."""


def train_grid(records: Sequence[TrainRecord]) -> Grid:
    """Makes one row per run, in the order given; columns without information are left out."""
    columns = {
        "method": [Cell(r.spec, r.spec) for r in records],
        "seed": [Cell(str(r.seed), r.seed) for r in records],
        "step": [Cell(human.duration_ms(r.step_ms), r.step_ms) for r in records],
        "sent per step": [Cell(human.byte_size(r.sent_bytes), r.sent_bytes) for r in records],
        "ratio": [Cell(human.times(r.ratio), r.ratio) for r in records],
        "loss": [Cell(human.digits(r.final_loss), r.final_loss) for r in records],
        _metric_name(records): [Cell(human.digits(r.metric), r.metric) for r in records],
        _target_name(records): [_time_to_target(r) for r in records],
        _speed_name(records): [_speed(r, records) for r in records],
        "efficiency": [share(r.scaling_efficiency) for r in records],
        "peak memory": [_bytes(r.peak_device_bytes) for r in records],
        "status": [Cell(r.status, r.status) for r in records],
    }
    if len({r.seed for r in records}) == 1:
        del columns["seed"]
    if all(target_of(r) is None for r in records):
        del columns[_target_name(records)]
    if all(r.metric is None for r in records):
        del columns[_metric_name(records)]
    if all(r.scaling_efficiency is None for r in records):
        del columns["efficiency"]
    if all(r.peak_device_bytes is None for r in records):
        del columns["peak memory"]
    return _grid(columns, records)


def step_grid(records: Sequence[StepRecord]) -> Grid:
    """Makes one row per method: step time, its spread, bytes, speed, and the bound of the step.

    The number of steps is shown if any method took fewer than asked.
    """
    columns = {
        "method": [Cell(r.spec, r.spec) for r in records],
        "steps": [_steps(r) for r in records],
        "step": [Cell(human.duration_ms(r.step_ms), r.step_ms) for r in records],
        "20–80 %": [_spread(r) for r in records],  # noqa: RUF001  a range takes an en dash
        "sent per step": [Cell(human.byte_size(r.sent_bytes), r.sent_bytes) for r in records],
        "encode": [Cell(human.duration_ms(r.encode_ms), r.encode_ms) for r in records],
        "wire": [Cell(human.duration_ms(r.wire_ms), r.wire_ms) for r in records],
        "decode": [Cell(human.duration_ms(r.decode_ms), r.decode_ms) for r in records],
        "speed-up": [_step_speed(r) for r in records],
        "efficiency": [share(r.scaling_efficiency) for r in records],
        "peak memory": [_bytes(r.peak_device_bytes) for r in records],
        "wire at rate": [_ms(r.bound_wire_ms) for r in records],
        "bound": [_ms(r.bound_ms) for r in records],
        "step / bound": [_ratio(r.ratio_to_bound) for r in records],
        "status": [Cell(r.status, r.status) for r in records],
    }
    if not any(map(took_fewer_steps, records)):
        del columns["steps"]
    for name in ("peak memory", *BOUND_COLUMNS):
        if all(cell.key is None for cell in columns[name]):
            del columns[name]
    return _grid(columns, records)


def took_fewer_steps(record: StepRecord) -> bool:
    return record.steps_asked is not None and record.steps < record.steps_asked


def kernel_grid(records: Sequence[KernelRecord]) -> Grid:
    """Makes one row per method; `step` has error feedback, `decode 8` adds up eight messages."""
    columns = {
        "method": [Cell(r.spec, r.spec) for r in records],
        "encode": [_us(r.encode_us) for r in records],
        "decode": [_us(r.decode_us) for r in records],
        "decode 8": [_us(r.decode8_us) for r in records],
        "decode 8 / floor": [_over(r.decode8_us, r.decode8_floor_us) for r in records],
        "step": [_us(r.ef_step_us) for r in records],
        "by calls": [_us(r.ef_step_eager_us) for r in records],
        "floor": [_us(r.floor_us) for r in records],
        "step / floor": [_factor(r.ratio_to_floor) for r in records],
        "step / add": [_factor(r.ratio_to_add) for r in records],
        "bits": [Cell(human.digits(r.bits_per_element), r.bits_per_element) for r in records],
        "status": [_kernel_status(r) for r in records],
    }
    if all(r.ef_step_by == "eager" for r in records):
        del columns["by calls"]
    for name in ("decode 8 / floor", "step / add"):
        if all(cell.key is None for cell in columns[name]):
            del columns[name]
    return _grid(columns, records)


def share(value: float | None) -> Cell:
    return Cell(human.NO_VALUE if value is None else f"{value:.0%}", value)


def _over(time_us: float | None, floor_us: float | None) -> Cell:
    return _factor(time_us / floor_us if time_us and floor_us else None)


def _kernel_status(record: KernelRecord) -> Cell:
    """Shows the time limit of a method that was over it: the error begins with "over 30 s:"."""
    over = record.status == "interrupted" and record.error is not None
    text = (record.error or "").partition(":")[0] if over else record.status
    return Cell(text, text)


def _steps(record: StepRecord) -> Cell:
    fewer = took_fewer_steps(record)
    text = f"{record.steps} of {record.steps_asked}" if fewer else str(record.steps)
    return Cell(text, record.steps)


def _bytes(value: float | None) -> Cell:
    return Cell(human.byte_size(value), value)


def _ms(time_ms: float | None) -> Cell:
    return Cell(human.duration_ms(time_ms), time_ms)


def _ratio(value: float | None) -> Cell:
    return Cell(human.NO_VALUE if value is None else f"{value:.2f}", value)


def _factor(value: float | None) -> Cell:
    known = value is not None and math.isfinite(value)
    return Cell(f"{value:.1f}" if known else human.NO_VALUE, value if known else None)


def _us(time_us: float | None) -> Cell:
    return Cell(human.duration_ms(None if time_us is None else time_us / 1e3), time_us)


def _grid(columns: dict[str, list[Cell]], records: Sequence[Record]) -> Grid:
    """Transposes columns to rows; leaves out the status if every run is done."""
    if all(record.status == "done" for record in records):
        del columns["status"]
    cells = zip(*columns.values(), strict=True)
    rows = zip(records, cells, strict=True)
    return Grid(tuple(columns), tuple(Row(r.spec, r.status, tuple(row)) for r, row in rows))


def _metric_name(records: Sequence[TrainRecord]) -> str:
    names = dict.fromkeys(r.metric_name for r in records if r.metric_name)
    return " / ".join(names) or "metric"


def _target_name(records: Sequence[TrainRecord]) -> str:
    target = common_target(records)
    return "time to target" if target is None else f"time to {target.words()}"


def _speed_name(records: Sequence[TrainRecord]) -> str:
    return "step speed-up" if common_target(records) is None else "speed-up"


def _time_to_target(record: TrainRecord) -> Cell:
    missed = target_of(record) is not None and record.time_to_target_s is None
    text = "not reached" if missed else human.duration_s(record.time_to_target_s)
    return Cell(text, record.time_to_target_s)


def _speed(record: TrainRecord, records: Sequence[TrainRecord]) -> Cell:
    factor = speed_up(record, records)
    return Cell(human.times(factor), factor)


def _step_speed(record: StepRecord) -> Cell:
    factor = 1 / record.ratio_to_dense if record.ratio_to_dense else None
    return Cell(human.times(factor), factor)


def _spread(record: StepRecord) -> Cell:
    if record.step_ms_quantiles is None:
        return Cell(human.NO_VALUE, None)
    low, _, high = record.step_ms_quantiles
    text = human.duration_ms(high)
    # One unit for both ends: the table must fit into 80 columns.
    start = human.duration_ms(low).removesuffix(text[text.rindex(" ") :])
    return Cell(f"{start} – {text}", high - low)  # noqa: RUF001
