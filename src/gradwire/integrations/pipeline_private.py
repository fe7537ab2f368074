"""Access to internals of torch.distributed.pipelining: all private names of it are in this file.

| torch | differs |
|---|---|
| 2.7 | the first version whose stages have all methods that are wrapped here |
| 2.13 | shapes of outputs are in `_stage_meta`; before, `get_outputs_meta` returns them |

A stage gets its traffic from `get_fwd_send_ops`, `get_fwd_recv_ops`, `get_bwd_send_ops` and
`get_bwd_recv_ops`, lists of `P2POp`, and reads what arrived by `_retrieve_recv_activations` and
`_retrieve_recv_grads`. Every schedule goes through these. Neighbours on one rank (V-schedules) hand
over tensors without them.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from gradwire.errors import ConfigError
from gradwire.stages.method import Direction, Form

Stage: TypeAlias = Any
"""A PipelineStage, whose import would take as long as that of FSDP."""
Schedule: TypeAlias = Any

SINCE = "2.7"
_SEND = {"activations": "get_fwd_send_ops", "gradients": "get_bwd_send_ops"}
_RECEIVE = {"activations": "get_fwd_recv_ops", "gradients": "get_bwd_recv_ops"}
_READ = {"activations": "_retrieve_recv_activations", "gradients": "_retrieve_recv_grads"}
_BEGIN, _PREPARE, _STEP = "clear_runtime_states", "_prepare_forward_infra", "step"


def check_version(version: str = torch.__version__) -> None:
    """Raises ConfigError if this torch has no stages that can be compressed."""
    if TorchVersion(version) < SINCE:
        raise ConfigError(f"attach_pipeline needs torch {SINCE} or newer, got {version}")


class Traffic(Protocol):
    """Receives the calls of a stage about its messages."""

    def begin_step(self, stage: Stage) -> None: ...

    def shapes_known(self, stage: Stage) -> None: ...

    def send(
        self, stage: int, direction: Direction, microbatch: int, tensors: list[Tensor]
    ) -> list[Tensor]: ...

    def post(
        self, stage: int, direction: Direction, microbatch: int, targets: list[Tensor]
    ) -> list[Tensor]: ...

    def fill(self, stage: int, direction: Direction, microbatch: int) -> None: ...


def find_stages(given: object) -> tuple[list[Stage], Schedule | None]:
    """Returns the stages of a schedule, or those given, and the schedule if it is one."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    schedule = given if isinstance(given, _PipelineSchedule) else None
    found: object = given
    if schedule is not None:
        found = getattr(schedule, "_stages", None) or [schedule._stage]  # type: ignore[attr-defined]
    stages = list(found) if isinstance(found, Sequence) else [found]
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            raise ConfigError(
                "attach_pipeline: expected a PipelineStage, a list of them or a schedule, got "
                f"{type(stage).__name__}"
            )
        if _SEND["activations"] in vars(stage):
            raise ConfigError(
                f"attach_pipeline: stage {stage.stage_index} is attached already; detach it first"
            )
    if not stages:
        raise ConfigError("attach_pipeline: got no stage")
    return stages, schedule


def group_of(stage: Stage) -> dist.ProcessGroup:
    """Returns the process group of the pipeline."""
    group: dist.ProcessGroup = stage.group or dist.distributed_c10d._get_default_group()
    return group


def peer_of(stage: Stage, index: int) -> int | None:
    """Returns the global rank of a neighbouring stage; None if that is on this rank, or is none."""
    if not 0 <= index < stage.num_stages:
        return None
    rank = stage.stage_index_to_group_rank[index]
    return None if rank == stage.group_rank else dist.get_global_rank(group_of(stage), rank)


def microbatches_of(stage: Stage, schedule: Schedule | None) -> int:
    """Returns the number of micro-batches of a step, 0 before the first step of a lone stage."""
    return int(schedule._n_microbatches if schedule is not None else stage.chunks or 0)


def output_forms(stage: Stage) -> list[Form]:
    """Returns shapes and types of a stage's outputs."""
    meta = getattr(stage, "_stage_meta", None)
    outputs = stage.get_outputs_meta() if meta is None else meta.outputs
    return [Form(tuple(each.shape), each.dtype) for each in outputs]


def input_forms(stage: Stage) -> list[Form]:
    """Returns shapes and types of what a stage receives."""
    buffers = [getattr(info, "buffer", None) for info in stage.args_recv_info[0]]
    return [Form.of(buffer) for buffer in buffers if buffer is not None]


def install(stage: Stage, traffic: Traffic) -> Callable[[], None]:
    """Routes the messages of a stage through `traffic`; returns a function that undoes it."""
    index = stage.stage_index

    def replacing(
        name: str,
        replaced: Callable[[int, Direction, int, list[Tensor]], list[Tensor]],
        direction: Direction,
    ) -> None:
        original = getattr(stage, name)

        @wraps(original)
        def wrapped(microbatch: int) -> list[dist.P2POp]:
            ops: list[dist.P2POp] = original(microbatch)
            tensors = replaced(index, direction, microbatch, [op.tensor for op in ops])
            for op, tensor in zip(ops, tensors, strict=True):
                op.tensor = tensor
            return ops

        setattr(stage, name, wrapped)

    def reading(direction: Direction) -> None:
        original = getattr(stage, _READ[direction])

        @wraps(original)
        def wrapped(microbatch: int) -> Any:
            traffic.fill(index, direction, microbatch)
            return original(microbatch)

        setattr(stage, _READ[direction], wrapped)

    def following(name: str, noted: Callable[[Stage], None], first: bool) -> None:
        original = getattr(stage, name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if first:
                noted(stage)
            result = original(*args, **kwargs)
            if not first:
                noted(stage)
            return result

        setattr(stage, name, wrapped)

    directions: tuple[Direction, ...] = ("activations", "gradients")
    for direction in directions:
        replacing(_SEND[direction], traffic.send, direction)
        replacing(_RECEIVE[direction], traffic.post, direction)
        reading(direction)
    following(_BEGIN, traffic.begin_step, first=True)
    following(_PREPARE, traffic.shapes_known, first=False)

    def undo() -> None:
        for name in (*_SEND.values(), *_RECEIVE.values(), *_READ.values(), _BEGIN, _PREPARE):
            delattr(stage, name)

    return undo


class Guarded(Protocol):
    """Runs a step of a schedule with these tensors on this rank."""

    def __call__(self, step: Callable[[], Any], batch: dict[str, Form], *, trains: bool) -> Any: ...


def guard_step(schedule: Schedule, guarded: Guarded) -> Callable[[], None]:
    """Runs each step of a schedule by `guarded`; returns a function that undoes it."""
    original = schedule.step

    @wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        given = {**{f"argument {index}": each for index, each in enumerate(args)}, **kwargs}
        batch = {name: Form.of(each) for name, each in given.items() if isinstance(each, Tensor)}
        trains = bool(schedule._has_backward)
        return guarded(lambda: original(*args, **kwargs), batch, trains=trains)

    schedule.step = step

    def undo() -> None:
        delattr(schedule, _STEP)

    return undo


def is_lost_peer(error: BaseException) -> bool:
    """Returns whether an error of torch means that another rank is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)
