"""The records of all benchmarks: frozen dataclasses, one per kind.

`files` writes them as JSON lines and reads them back. The value of `kind` names the dataclass.
Training runs, step times and kernel costs come first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gradwire.auto.accuracy_risk import Level
from gradwire.bench.case import Change

VERSION = 1
"""The version of the record format; records of another version are refused."""

BASELINE = "ddp-fp32"
COMPUTE = "compute-only"

Status = Literal["done", "failed", "diverged", "interrupted"]
Direction = Literal["higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One evaluation in a training run; `sent_bytes` is the total of one worker so far."""

    step: int
    time_s: float
    loss: float
    sent_bytes: float
    metric: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """One training run with one method; a field that was not measured is None.

    Bytes are per worker and step. `rate` is the links' rate as given ("100mbit"), and is valid only
    if `shaped`, that is, if the links were really limited to it. `sent_bytes` is counted by the
    method, `interface_bytes` by the operating system. `compute_ms` is the step without
    communication in the same setting, and `scaling_efficiency` its share of the step: the work of N
    workers over N times that of one. `losses` are of rank 0's batches, at every step.
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
    """The decisions of a controller; only the last ones if there were many."""
    simulated: bool = False
    """True if workers were simulated in one process; times are then predictions for `rate`."""
    lockstep_ms: float | None = None
    """The time of one simulated step of all workers, between the evaluations where it was least."""
    peak_device_bytes: float | None = None
    """The most memory of the GPU that rank 0 held; None on a CPU."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The step time of one method; `ratio_to_dense` is relative to ddp-fp32 in the same run.

    Optional fields have the meaning that they have in `TrainRecord`. `steps` were timed of the
    `steps_asked`: fewer if the case was slow. The bounds are those of `bench/records/bound.py`;
    None if links had no rate, or if there was no compute-only case.
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
    steps_asked: int | None = None
    received_bytes: float | None = None
    exposed_bytes: float | None = None
    """Bytes that cannot be sent before the last gradient of a step is known."""
    bound_wire_ms: float | None = None
    bound_ms: float | None = None
    ratio_to_bound: float | None = None
    peak_device_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class KernelRecord:
    """The cost of one method at one size.

    `ef_step` maps a gradient and a residual to a message and the new residual; `floor` is the lower
    bound of its time by memory traffic. If the step can be captured, `ef_step_us` is the time of a
    CUDA graph and `ef_step_eager_us` that of single calls; otherwise both are that of calls, and
    `graph_error` holds the reason. `decode8`, which adds up eight messages, has the same fields.
    `add_us`, on a CPU, is `torch.add(g, r, out=r)`. A method that is not a `contraction` may have
    no residual in training, but is measured with one.
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
    """Threads of torch, which the kernels on a CPU use too."""
    status: Status = "done"
    error: str | None = None
    command: str
    machine: dict[str, str]


RunRecord: TypeAlias = TrainRecord | StepRecord
"""A record of a run with several workers."""

Record: TypeAlias = RunRecord | KernelRecord
KINDS: Mapping[str, type[Record]] = {
    "train": TrainRecord,
    "step": StepRecord,
    "kernel": KernelRecord,
}


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
    """None if the links were probed."""
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
    """Cores that other programs used during the measurement."""
    beside_others_ms: float | None = None
    """The prediction for the cores that other programs left free."""
    relative_error: float | None = None
    risk: Level | None = None
    advised: bool | None = None
    """Set by `gradwire advise`: the compression error of one step, the risk for accuracy, and
    whether the method was chosen."""

    @property
    def prediction_error(self) -> float | None:
        """The relative error of the prediction; None without a measurement."""
        return None if self.measured_ms is None else self.step_ms / self.measured_ms - 1


@dataclass(frozen=True, kw_only=True)
class LevelsRecord:
    """Two-level selection of one sparsifier at one size, against selecting twice.

    Both select indices and values at two factors, and add the residual once. Times are of CUDA
    graphs where `by` is "graph".
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
    """`twice_us` over `two_levels_us`."""
    by: Literal["graph", "eager"]
    command: str
    machine: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive steps at one link rate; `settled_ms` is the median step of the second half."""

    rate: str
    first: int
    """The first step at this link rate, accurate to the steps of 0.2 s."""
    steps: int
    seconds: float
    settled_ms: float
    setting: str | None
    """The setting of a controller at the end of the phase."""
    changed_after: int | None = None
    """Steps of the phase until a controller or the automatic mode first changed the setting."""


@dataclass(frozen=True, kw_only=True)
class FollowRecord:
    """One case on links whose rate changes, over all phases."""

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
class KerasRecord:
    """The median Keras step of one method; `ratio` is to that of `against` in the same run."""

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
class GuardRecord:
    """The cost of one guard: `ratio` is the median over rounds of a step with it to one without.

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
    """Steps in each round, both with and without the guard."""
    without_ms: float
    with_ms: float
    ratio: float
    quartiles: tuple[float, float]
    limit: float
    command: str
    machine: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class OverheadRecord:
    """The cost of `none` through an integration, against the same training without Gradwire.

    `ratio` is the median of that of neighbouring steps or, inside a trainer, of neighbouring runs.
    """

    kind: Literal["overhead"] = "overhead"
    version: int = VERSION
    spec: str = "none"
    integration: str
    workers: int
    device: str
    width: int
    """Entries of a side of the model's two square layers."""
    compared: int
    """The number of ratios."""
    plain_ms: float
    none_ms: float
    ratio: float
    quartiles: tuple[float, float]
    limit: float
    command: str
    machine: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class FuzzRecord:
    """Fuzzed messages to one method: each is decoded, refused, or makes the decoder crash."""

    kind: Literal["fuzz"] = "fuzz"
    version: int = VERSION
    spec: str
    ways: tuple[str, ...]
    """The exchanges that delivered the messages."""
    messages: int
    decoded: int
    refused: int
    crashes: int
    crash_texts: tuple[str, ...]
    """The texts of the first few crashes."""
    cpu_s: float
    peak_grown_kb: int
    seed: int
    command: str
    machine: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class FaultRecord:
    """One fault in a running job, and how its ranks ended."""

    kind: Literal["fault"] = "fault"
    version: int = VERSION
    number: int
    job: str
    fault: str
    phase: str
    """Where in a step a rank was killed; empty for other faults."""
    rank: int
    step: int
    resumed_from: int
    detected_s: float
    """Time from the fault to the last error of another rank; -1 if there was none."""
    errors: dict[str, int]
    hung: int
    """Ranks that did not end by themselves."""
    as_expected: bool
    lost_checkpoints: int
    """Steps by which the newest checkpoint of all ranks went back."""
    threads_left: int


@dataclass(frozen=True, kw_only=True)
class CampaignRecord:
    """The outcome of all faults in one job, compared with a job without faults."""

    kind: Literal["campaign"] = "campaign"
    version: int = VERSION
    job: str
    spec: str
    faults: int
    seed: int
    workers: int
    rate: str
    timeout_s: float
    hung: int
    unexpected: int
    lost_checkpoints: int
    wrong_losses: int
    same_weights: bool | None
    """None where weights depend on the order in which workers sync."""
    max_detected_s: float
    took_s: float
    command: str
    machine: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ElasticRecord:
    """One job of replicas that were killed and started again."""

    kind: Literal["elastic"] = "elastic"
    version: int = VERSION
    spec: str
    """The method; "torchft" is its own `Manager.allreduce`, "torchft-ddp" its wrapper of DDP."""
    replicas: int
    kills: int
    hit_member: tuple[bool, ...]
    """For each kill, whether it hit a replica that had joined, not one that was joining."""
    survived: int
    """Kills after which the others committed a step."""
    hung: bool
    unexpected: tuple[str, ...]
    """The last words of replicas that ended by themselves."""
    repeated_steps: int
    """Steps that were committed a second time, since the state of the job was lost."""
    steps: int
    """Committed steps; of local methods, syncs."""
    compared: int
    """Digests of parameters that were compared with that of another replica after the step."""
    wrong_steps: int
    """Steps after which not all replicas had the same bits."""
    rollbacks: int
    """Steps that a replica did not commit, summed over replicas."""
    recovery_s: tuple[float, ...]
    """Time from each kill to the end of the first committed step that began after it."""
    rejoin_s: tuple[float, ...]
    """Time from the start of a process to its first committed step."""
    first_loss: float | None
    last_loss: float | None
    sent_bytes: float | None
    """Bytes that a replica sends per step while all are present; None for torchft's own."""
    join_timeout_ms: int
    heartbeat_timeout_ms: int
    seed: int
    took_s: float
    command: str
    machine: dict[str, str]


OtherRecord: TypeAlias = (
    ForecastRecord
    | LevelsRecord
    | FollowRecord
    | KerasRecord
    | GuardRecord
    | OverheadRecord
    | FuzzRecord
    | FaultRecord
    | CampaignRecord
    | ElasticRecord
)
FORECAST = "forecast"
OTHERS: Mapping[str, type[OtherRecord]] = {
    FORECAST: ForecastRecord,
    "levels": LevelsRecord,
    "follow": FollowRecord,
    "keras": KerasRecord,
    "guard": GuardRecord,
    "overhead": OverheadRecord,
    "fuzz": FuzzRecord,
    "fault": FaultRecord,
    "campaign": CampaignRecord,
    "elastic": ElasticRecord,
}
UNVERSIONED = ("follow",)
"""Kinds whose first records have no version; it is 1 then."""

AnyRecord: TypeAlias = Record | OtherRecord
