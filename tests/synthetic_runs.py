"""Plausible records for tests; no number here was measured."""

import math
from dataclasses import replace

from gradwire.bench.records.schema import Point, StepRecord, TrainRecord

MACHINE = {"cpu": "Imaginary 9000", "cores": "2", "python": "3.11.7", "torch": "2.13.0"}
DENSE_BYTES = 35e6
TARGET = 0.35


def train(spec: str, step_ms: float, ratio: float, slowdown: float = 1.0) -> TrainRecord:
    """Returns a run whose loss decays with its steps, `slowdown` times slower than dense."""
    sent = DENSE_BYTES / ratio
    points = tuple(_point(step, step_ms, sent, slowdown) for step in range(0, 240, 2))
    reached = next((p.time_s for p in points if p.loss <= TARGET), None)
    split = (None, None, None) if spec.startswith(("ddp", "torch")) else (8.2, 31.0, 5.4)
    return TrainRecord(
        spec=spec,
        workload="mlp on synthetic digits",
        workers=4,
        rate="100mbit",
        shaped=True,
        seed=0,
        status="done",
        command="gradwire demo --workers 4 --rate 100mbit",
        machine=MACHINE,
        points=points,
        step_ms=step_ms,
        sent_bytes=sent,
        dense_bytes=DENSE_BYTES,
        ratio=ratio,
        final_loss=points[-1].loss,
        metric=0.97,
        metric_name="accuracy",
        target_loss=TARGET,
        time_to_target_s=reached,
        encode_ms=split[0],
        wire_ms=split[1],
        decode_ms=split[2],
    )


def _point(step: int, step_ms: float, sent_bytes: float, slowdown: float) -> Point:
    wobble = 0.08 * math.sin(step * 12.9898) * math.exp(-step / 150)
    loss = 0.12 + 2.2 * math.exp(-step / (45 * slowdown)) + wobble
    return Point(step=step, time_s=step * step_ms / 1e3, loss=loss, sent_bytes=step * sent_bytes)


def step(spec: str, step_ms: float, ratio: float) -> StepRecord:
    return StepRecord(
        spec=spec,
        workers=4,
        rate="1gbit",
        shaped=True,
        steps=50,
        batch=32,
        parameters=5_823_498,
        status="done",
        command="gradwire bench step --workers 4 --rate 1gbit",
        machine=MACHINE,
        step_ms=step_ms,
        step_ms_quantiles=(0.94 * step_ms, step_ms, 1.09 * step_ms),
        sent_bytes=DENSE_BYTES / ratio,
        ratio_to_dense=step_ms / 366,
        encode_ms=None if spec.startswith(("ddp", "torch")) else 9.1,
        wire_ms=None if spec.startswith(("ddp", "torch")) else 22.0,
        decode_ms=None if spec.startswith(("ddp", "torch")) else 4.0,
    )


def training_runs() -> list[TrainRecord]:
    return [
        train("ddp-fp32", 3117, 1),
        train("torch-fp16", 1617, 2),
        train("torch-powersgd:rank=1", 204, 388, 1.5),
        train("topk:ratio=0.01", 286, 25, 1.15),
        train("sign", 356, 32, 1.25),
        train("powersgd:rank=4", 231, 97, 1.2),
        train("topk:ratio=0.01 | qsgd:bits=4", 241, 71, 1.2),
    ]


def failed(record: TrainRecord, error: str) -> TrainRecord:
    return replace(
        record,
        status="failed",
        error=error,
        points=(),
        step_ms=None,
        sent_bytes=None,
        ratio=None,
        final_loss=None,
        metric=None,
        time_to_target_s=None,
        encode_ms=None,
        wire_ms=None,
        decode_ms=None,
    )


def steps() -> list[StepRecord]:
    return [
        step("ddp-fp32", 366, 1),
        step("torch-fp16", 237, 2),
        step("torch-powersgd:rank=1", 193, 388),
        step("topk:ratio=0.01", 128, 25),
        step("sign", 173, 16),
    ]


def scaled() -> list[TrainRecord]:
    """Returns the runs with 2 and 8 workers, with all fields of newer records."""
    runs = [(workers, run) for workers in (2, 8) for run in training_runs()]
    return [
        replace(
            run,
            workers=workers,
            steps=240,
            batch=32,
            metric=0.97 - 0.3 / (run.step_ms or 1),
            metric_better="higher",
            backend="numba",
            compute_ms=100.0,
            scaling_efficiency=100 / (workers * (run.step_ms or 1)),
            step_ms=workers * (run.step_ms or 1),
            interface_bytes=1.02 * (run.sent_bytes or 0),
            points=tuple(replace(p, metric=1 - 1 / (1 + p.step)) for p in run.points),
        )
        for workers, run in runs
    ]
