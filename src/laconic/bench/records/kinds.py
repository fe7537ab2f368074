"""What one benchmark run measured: frozen records. `files` keeps them as JSON lines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from laconic.bench.case import Change
from laconic.bench.records.files import VERSION, append, check_writable, read_kinds
from laconic.bench.records.others import OTHERS, UNVERSIONED, OtherRecord

__all__ = [
    "BASELINE",
    "COMPUTE",
    "KINDS",
    "VERSION",
    "AnyRecord",
    "KernelRecord",
    "Point",
    "Record",
    "RunRecord",
    "Status",
    "StepRecord",
    "TrainRecord",
    "append",
    "check_writable",
    "read",
    "read_every",
]

BASELINE = "ddp-fp32"
COMPUTE = "compute-only"

Status = Literal["done", "failed", "diverged", "interrupted"]
Direction = Literal["higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One look at a training run; `sent_bytes` is what one worker has sent so far."""

    step: int
    time_s: float
    loss: float
    sent_bytes: float
    metric: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """One training run with one method; what was not measured is None.

    Bytes are per worker and step. `rate` is the links' rate as given ("100mbit"), and counts only
    where `shaped` says that the links really were limited to it. `interface_bytes` is what the
    operating system saw where `sent_bytes` is what the method says. `compute_ms` is the step
    without communication in the same setting, and `scaling_efficiency` its share of the step: what
    N workers get done over N times what one would. `losses` are of rank 0's batches, every step.
    """

    kind: Literal["train"] = "train"
    version: int = VERSION
    spec: str
    workload: str
    workers: int
    rate: str | None
    shaped: bool
    seed: int
    status: Status
    error: str | None = None
    command: str
    machine: dict[str, str]
    points: tuple[Point, ...] = field(default=(), repr=False)
    step_ms: float | None = None
    sent_bytes: float | None = None
    dense_bytes: float | None = None
    ratio: float | None = None
    final_loss: float | None = None
    metric: float | None = None
    metric_name: str | None = None
    target_loss: float | None = None
    time_to_target_s: float | None = None
    encode_ms: float | None = None
    wire_ms: float | None = None
    decode_ms: float | None = None
    workload_spec: str | None = None
    data: str | None = None
    device: str = "cpu"
    backend: str | None = None
    steps: int | None = None
    evaluate_every: int | None = None
    batch: int | None = None
    parameters: int | None = None
    metric_better: Direction | None = None
    target_metric: float | None = None
    interface_bytes: float | None = None
    compute_ms: float | None = None
    scaling_efficiency: float | None = None
    losses: tuple[float, ...] = field(default=(), repr=False)
    timeline: tuple[Change, ...] = field(default=(), repr=False)
    """What a controller has decided: the last of it, where that was much."""
    simulated: bool = False
    """Workers in lock step in one process; times are predictions for the links that are named."""
    lockstep_ms: float | None = None
    """What a step of them all took in that process, between the two looks where it took least."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The step time of one method; `ratio_to_dense` is relative to ddp-fp32 in the same run.

    What is optional means the same as in a training record.
    """

    kind: Literal["step"] = "step"
    version: int = VERSION
    spec: str
    workers: int
    rate: str | None
    shaped: bool
    steps: int
    batch: int
    parameters: int
    status: Status
    error: str | None = None
    command: str
    machine: dict[str, str]
    step_ms: float | None = None
    step_ms_quantiles: tuple[float, float, float] | None = None
    sent_bytes: float | None = None
    ratio_to_dense: float | None = None
    encode_ms: float | None = None
    wire_ms: float | None = None
    decode_ms: float | None = None
    workload: str | None = None
    device: str = "cpu"
    backend: str | None = None
    interface_bytes: float | None = None
    compute_ms: float | None = None
    scaling_efficiency: float | None = None


@dataclass(frozen=True, kw_only=True)
class KernelRecord:
    """What one method costs at one size.

    `ef_step` takes a gradient and a residual and gives a message and the new residual; `floor` is
    the least that memory traffic allows for that. Where the card can do it without the host,
    `ef_step_us` is the time of a CUDA graph, and `ef_step_eager_us` has what the calls cost; else
    both are that, and `graph_error` says why. So for `decode8`, which adds up eight messages.
    `add_us`, on a CPU, is `torch.add(g, r, out=r)`. A method that is no `contraction` may keep no
    residual in training, and is measured with one all the same.
    """

    kind: Literal["kernel"] = "kernel"
    version: int = VERSION
    method: str
    spec: str
    device: str
    backend: str
    numel: int
    encode_us: float
    decode_us: float
    decode8_us: float | None
    ef_step_us: float
    payload_bytes: int
    bits_per_element: float
    floor_us: float
    ratio_to_floor: float
    ef_step_by: Literal["graph", "eager"] = "eager"
    ef_step_eager_us: float | None = None
    graph_error: str | None = None
    decode8_eager_us: float | None = None
    decode8_floor_us: float | None = None
    add_us: float | None = None
    ratio_to_add: float | None = None
    contraction: bool | None = None
    threads: int = 1
    """Of torch, and so of the kernels on a CPU."""
    status: Status = "done"
    error: str | None = None
    command: str
    machine: dict[str, str]


RunRecord: TypeAlias = TrainRecord | StepRecord
"""What comes from a run of several workers."""

Record: TypeAlias = RunRecord | KernelRecord
KINDS: Mapping[str, type[Record]] = {
    "train": TrainRecord,
    "step": StepRecord,
    "kernel": KernelRecord,
}
AnyRecord: TypeAlias = Record | OtherRecord


def read(paths: Iterable[Path]) -> list[Record]:
    """The runs and kernels of every file, in order; other kinds of records are left out."""
    return [record for path in paths for record in read_kinds(path, KINDS, tuple(OTHERS))]


def read_every(paths: Iterable[Path]) -> list[AnyRecord]:
    """Every record of every file, in order, whatever its kind."""
    kinds: Mapping[str, type[AnyRecord]] = {**KINDS, **OTHERS}
    return [r for path in paths for r in read_kinds(path, kinds, unversioned=UNVERSIONED)]
