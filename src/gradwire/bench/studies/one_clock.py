"""One clock for simulated runs: one compute time per workload and device in all of their records.

Runs of one study are often made in several sessions, each of which has measured the computation of
a step again. Their times are comparable only if they contain the same computation. `with_one_clock`
recomputes times from the bytes, the encode and decode times of a record and the median compute
time; losses, bytes and the link model stay as they are.

The exchange of a step takes `encode + wire + decode`, part of which overlaps the computation. If it
is longer than the computation, the overlapped part grows and shrinks with it; if it is shorter, the
overlapped part cannot grow. A local method without a delay overlaps nothing, and one with a delay
overlaps its syncs with the steps of the delay.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from gradwire.bench.cases.local import LocalCase
from gradwire.bench.cases.local_settings import SyncSchedule
from gradwire.bench.cases.parse import parse_case
from gradwire.bench.records.compare import efficiency, target_of, time_to_target
from gradwire.bench.records.files import read, to_row
from gradwire.bench.records.schema import KernelRecord, Point, Record, TrainRecord
from gradwire.comm.cost_model import parse_rate
from gradwire.spec import format_spec, parse, read_settings

WITHOUT_EFFECT = ("learning_rate", "clip_norm", "weight_decay")
"""Settings of a workload that do not change the time of its computation."""


class ClockKey(NamedTuple):
    """Runs with equal keys have the same compute time."""

    workload: str
    device: str
    processor: str


def clock_key(workload: str, device: str, machine: Mapping[str, str]) -> ClockKey:
    name, settings = read_settings(workload)
    kept = ",".join(f"{k}={v}" for k, v in sorted(settings.items()) if k not in WITHOUT_EFFECT)
    processor = machine.get("gpu" if device == "cuda" else "cpu", "unknown")
    return ClockKey(f"{name}:{kept}" if kept else name, device, processor)


def key_of(record: TrainRecord) -> ClockKey:
    return clock_key(record.workload_spec or record.workload, record.device, record.machine)


def compute_times(records: Iterable[TrainRecord]) -> dict[ClockKey, float]:
    """Returns the median of the compute times that different sessions have measured."""
    found: dict[ClockKey, set[float]] = {}
    for record in records:
        if record.simulated and record.compute_ms is not None:
            found.setdefault(key_of(record), set()).add(record.compute_ms)
    return {key: median(times) for key, times in found.items()}


class Rewritten(NamedTuple):
    """A file of records, and how many of them have new times."""

    path: Path
    changed: int
    records: int


class Codec(NamedTuple):
    """Encode and decode times per step, averaged over the steps between syncs."""

    encode_ms: float
    decode_ms: float


def kernel_codec(record: TrainRecord, kernels: Sequence[KernelRecord]) -> Codec | None:
    """Returns encode and decode times of a local method from kernel costs on the same GPU.

    Only costs of the same method with the same settings count; None if there are none, or if the
    run was on a CPU. Costs are those of one tensor with all parameters, interpolated between the
    smallest and the largest measured size, which is a lower bound for a model of many tensors.
    Decoding is that of eight messages if it was measured.
    """
    if record.device != "cuda":
        return None
    case = parse_case(record.spec)
    assert isinstance(case, LocalCase)
    method, gpu = _canonical(case.spec), record.machine["gpu"]
    own = [k for k in kernels if k.device == gpu and _canonical(k.spec) == method]
    sizes = sorted({k.numel: k for k in own}.values(), key=lambda k: k.numel)
    if len(sizes) < 2:
        return None
    small, large = sizes[0], sizes[-1]
    assert record.parameters is not None
    share = max(0.0, (record.parameters - small.numel) / (large.numel - small.numel))
    encode_us = small.ef_step_us + share * (large.ef_step_us - small.ef_step_us)
    first, last = (k.decode_us if k.decode8_us is None else k.decode8_us for k in (small, large))
    decode_us = first + share * (last - first)
    interval = case.sync_schedule().interval
    return Codec(encode_us / 1e3 / interval, decode_us / 1e3 / interval)


def _canonical(spec: str) -> str:
    """Returns the spec with settings in a fixed form, so that equal methods have equal texts."""
    return format_spec(parse(spec))


def with_one_clock(
    record: TrainRecord, compute_ms: float, codec: Codec | None = None
) -> TrainRecord:
    """Returns the run with times that contain `compute_ms`; `codec` is for local methods."""
    if not record.simulated or record.compute_ms is None or not record.points:
        return record
    if is_local(record):
        case = parse_case(record.spec)
        assert isinstance(case, LocalCase)
        return _local(record, compute_ms, codec, case.sync_schedule())
    return _exchanged(record, compute_ms)


def is_local(record: TrainRecord) -> bool:
    """Returns whether a local method made the record; some old cases cannot be parsed any more."""
    return "local=" in record.spec


def _exchanged(record: TrainRecord, compute_ms: float) -> TrainRecord:
    assert record.compute_ms is not None
    last = record.points[-1]
    step_ms = last.time_s * 1e3 / last.step
    exchange_ms = (record.encode_ms or 0) + (record.wire_ms or 0) + (record.decode_ms or 0)
    overlapped_ms = max(0.0, record.compute_ms + exchange_ms - step_ms)
    ratio = compute_ms / record.compute_ms
    scale = ratio if exchange_ms > record.compute_ms else min(1.0, ratio)
    more_ms = compute_ms - record.compute_ms - overlapped_ms * (scale - 1)
    points = tuple(_moved(point, point.step * more_ms / 1e3) for point in record.points)
    new_ms = None if record.step_ms is None else record.step_ms + more_ms
    return _rebuilt(record, points, compute_ms, new_ms)


def _local(
    record: TrainRecord, compute_ms: float, codec: Codec | None, schedule: SyncSchedule
) -> TrainRecord:
    """Recomputes the time on the wire from the old time, then adds the codec.

    Where the old clock hid all of the transfer, the time on the wire is that of the bytes.
    """
    assert record.compute_ms is not None
    known = record.encode_ms is not None
    encode_ms = record.encode_ms or 0.0 if known or codec is None else codec.encode_ms
    decode_ms = record.decode_ms or 0.0 if known or codec is None else codec.decode_ms
    added_ms = encode_ms + decode_ms - (record.encode_ms or 0.0) - (record.decode_ms or 0.0)
    interval, delay = schedule
    points = []
    for point in record.points:
        overlap_steps = point.step // interval * min(interval, delay)
        exposed_s = point.time_s - point.step * record.compute_ms / 1e3
        exchange_s = exposed_s + overlap_steps * record.compute_ms / 1e3
        if exposed_s <= 1e-9 and record.rate is not None:
            exchange_s = 8 * point.sent_bytes / parse_rate(record.rate)
        exchange_s += point.step * added_ms / 1e3
        waited_s = max(0.0, exchange_s - overlap_steps * compute_ms / 1e3)
        points.append(replace(point, time_s=point.step * compute_ms / 1e3 + waited_s))
    last = points[-1]
    changed = replace(
        record,
        encode_ms=encode_ms if known or codec else None,
        decode_ms=decode_ms if known or codec else None,
    )
    return _rebuilt(changed, tuple(points), compute_ms, last.time_s / last.step * 1e3)


def _rebuilt(
    record: TrainRecord, points: tuple[Point, ...], compute_ms: float, step_ms: float | None
) -> TrainRecord:
    return replace(
        record,
        points=points,
        compute_ms=compute_ms,
        step_ms=step_ms,
        scaling_efficiency=efficiency(compute_ms, step_ms),
        time_to_target_s=time_to_target(points, target_of(record)),
    )


def _moved(point: Point, by_s: float) -> Point:
    return replace(point, time_s=point.time_s + by_s)


def rewrite(paths: Sequence[Path], kernels: Sequence[KernelRecord]) -> list[Rewritten]:
    """Rewrites files of records with one compute time per workload and device over all of them."""
    by_file = {path: read([path]) for path in paths}
    runs = [r for records in by_file.values() for r in records if isinstance(r, TrainRecord)]
    times = compute_times(runs)
    # All files are computed before the first is written.
    renewed = {
        path: [_renewed(record, times, kernels) for record in records]
        for path, records in by_file.items()
    }
    found = []
    for path, records in renewed.items():
        pairs = zip(records, by_file[path], strict=True)
        changed = sum(new != old for new, old in pairs)
        if changed:
            lines = [json.dumps(to_row(record), allow_nan=False) + "\n" for record in records]
            path.write_text("".join(lines), encoding="utf-8")
        found.append(Rewritten(path, changed, len(records)))
    return found


def _renewed(
    record: Record, times: Mapping[ClockKey, float], kernels: Sequence[KernelRecord]
) -> Record:
    if isinstance(record, TrainRecord) and record.simulated and record.compute_ms is not None:
        return _on_clock(record, times[key_of(record)], kernels)
    return record


def _on_clock(
    record: TrainRecord, compute_ms: float, kernels: Sequence[KernelRecord]
) -> TrainRecord:
    local = is_local(record) and record.encode_ms is None
    return with_one_clock(record, compute_ms, kernel_codec(record, kernels) if local else None)
