"""The records of all benchmarks: frozen dataclasses, one per kind.

`files` writes them as JSON lines and reads them back. The value of `kind` names the dataclass.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from gradwire.bench.case import Change
from gradwire.bench.records.files import VERSION, read_kinds
from gradwire.perfmodel.accuracy_risk import Level


@dataclass(frozen=True, kw_only=True)
class KillRecord:
    """One kill, and what became of the others; `detected_s` is -1 where nobody noticed."""

    kind: Literal["kill"] = "kill"
    version: int = VERSION
    kill: int
    rank: int
    step: int
    phase: str
    resumed_from: int
    detected_s: float
    errors: dict[str, int]
    ended: bool
    """Whether all others ended by themselves, with an error."""
    threads_left: int


@dataclass(frozen=True, kw_only=True)
class ChaosRecord:
    """What all kills of a job came to, beside a job that was left alone."""

    kind: Literal["chaos"] = "chaos"
    version: int = VERSION
    kills: int
    seed: int
    spec: str
    workers: int
    rate: str
    timeout_s: float
    detected: int
    max_detected_s: float
    ended: int
    wrong_losses: int
    corrupted_checkpoints: int
    unfinished_files_ignored: int
    same_weights: bool
    took_s: float
    command: str = ""
    machine: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of steps at one rate; the median of the second half shows where it led."""

    rate: str
    first: int
    """The step from which on the links had this rate, give or take what passes in 0.2 s."""
    steps: int
    seconds: float
    settled_ms: float
    setting: str | None
    """Where a controller had settled at the end."""


@dataclass(frozen=True, kw_only=True)
class FollowRecord:
    """One case through all phases."""

    kind: Literal["follow"] = "follow"
    version: int = VERSION
    spec: str
    workload: str
    workers: int
    phases: tuple[Phase, ...]
    timeline: tuple[Change, ...]
    command: str
    machine: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ForecastRecord:
    """The predicted step of one method; bytes and calls are those of one worker in one step."""

    kind: Literal["forecast"] = "forecast"
    version: int = VERSION
    spec: str
    exchange: str
    workload: str
    parameters: int
    workers: int
    rate: str | None
    latency_ms: float | None
    """None where the links were probed."""
    device: str
    command: str
    machine: dict[str, str]
    step_ms: float
    compute_ms: float
    encode_ms: float
    wire_ms: float
    decode_ms: float
    sent_bytes: float
    calls: float
    measured_ms: float | None = None
    others_cores: float | None = None
    """Cores that other programs used while it was measured."""
    beside_others_ms: float | None = None
    """What would have been predicted for the cores that they left."""
    relative_error: float | None = None
    risk: Level | None = None
    advised: bool | None = None
    """What one step leaves unsaid, what that means for accuracy, and the choice, of an advice."""

    @property
    def off(self) -> float | None:
        """By which share of the measured time the prediction is wrong."""
        return None if self.measured_ms is None else self.step_ms / self.measured_ms - 1


@dataclass(frozen=True, kw_only=True)
class FuzzRecord:
    """The messages to one method: each is decoded or refused, or it is a crash."""

    kind: Literal["fuzz"] = "fuzz"
    version: int = VERSION
    spec: str
    ways: tuple[str, ...]
    """The exchanges in which they came."""
    messages: int
    decoded: int
    refused: int
    crashes: int
    crash_texts: tuple[str, ...]
    """Of the first few."""
    cpu_s: float
    peak_grown_kb: int
    seed: int
    command: str
    machine: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class GuardRecord:
    """One guard of one method: `ratio` is the median over rounds of the step with it to without.

    `nan` is the default against nan_policy=ignore, `checksum` is checksum=True against the default.
    """

    kind: Literal["guard"] = "guard"
    version: int = VERSION
    spec: str
    guard: str
    workers: int
    rate: str | None
    shaped: bool
    workload: str
    rounds: int
    steps: int
    """In each round, with and without."""
    without_ms: float
    with_ms: float
    ratio: float
    quartiles: tuple[float, float]
    limit: float
    command: str
    machine: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class KerasRecord:
    """The median step of one method; `ratio` is to that of `against` in the same run."""

    kind: Literal["keras"] = "keras"
    version: int = VERSION
    spec: str
    step_ms: float
    ratio: float
    sent_bytes: float | None
    against: str
    workers: int
    rate: str | None
    steps: int
    hidden: int
    batch: int
    tensorflow: str
    command: str = ""
    machine: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class LevelsRecord:
    """One sparsifier at one size; on a GPU the times are those of CUDA graphs where `by` says so.

    Each chooses positions and takes their values at both factors; the sum with a residual, which
    both need once, counts too.
    """

    kind: Literal["levels"] = "levels"
    version: int = VERSION
    spec: str
    factors: tuple[float, float]
    device: str
    backend: str
    numel: int
    two_levels_us: float
    twice_us: float
    ratio: float
    """Twice over two levels."""
    by: Literal["graph", "eager"]
    command: str
    machine: dict[str, str]


OtherRecord: TypeAlias = (
    ForecastRecord
    | LevelsRecord
    | FollowRecord
    | KerasRecord
    | GuardRecord
    | FuzzRecord
    | ChaosRecord
    | KillRecord
)
FORECAST = "forecast"
OTHERS: Mapping[str, type[OtherRecord]] = {
    FORECAST: ForecastRecord,
    "levels": LevelsRecord,
    "follow": FollowRecord,
    "keras": KerasRecord,
    "guard": GuardRecord,
    "fuzz": FuzzRecord,
    "chaos": ChaosRecord,
    "kill": KillRecord,
}
UNVERSIONED = ("follow", "chaos", "kill")
"""Kinds whose first records did not say their version, which was 1."""


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
