"""Training scripts that save and resume, as users would write them, with fault injection.

One per way of training: DDP, FSDP2, a local method, and asynchronous workers with a server.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

import gradwire
from gradwire.bench.faults.injection import Fault, FaultInjector, emit

JobKind: TypeAlias = Literal["ddp", "fsdp", "local", "async"]
SYNC_EVERY = 2


@dataclass(frozen=True)
class Job:
    """Settings of the training run; without a `folder` nothing is saved."""

    kind: JobKind = "ddp"
    folder: str | None = None
    steps: int = 8
    every: int = 2
    spec: str = "topk:ratio=0.1"
    exchange: str = "auto"
    width: int = 256
    timeout_s: float = 6.0
    checksum: bool = False
    lazy: dict[str, float] = field(default_factory=dict)
    """Seconds that a rank sleeps before every step."""


class Stateful(Protocol):
    """A part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> object: ...


@dataclass(frozen=True)
class Training:
    """A model in training; the context is entered after its parts were loaded."""

    model: nn.Module
    optimizer: Optimizer
    parts: Mapping[str, Stateful]
    context: AbstractContextManager[object] = field(default_factory=nullcontext)


def mlp(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Returns noisy copies of ten fixed patterns, and their labels."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (16,), generator=generator)
    return patterns[labels] + torch.randn(16, 64, generator=generator), labels


def ddp(job: Job) -> Training:
    model = DDP(mlp(job.width), bucket_cap_mb=0.1)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    link = gradwire.attach(
        model, job.spec, exchange=job.exchange, nan_policy="raise", checksum=job.checksum
    )
    parts: dict[str, Stateful] = {"model": model.module, "optimizer": optimizer, "link": link}
    return Training(model, optimizer, parts, closing(_Detaching(link.detach)))


def fsdp(job: Job) -> Training:
    model = mlp(job.width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [*model.children(), model]:
        if not isinstance(layer, nn.ReLU):
            fully_shard(layer, mesh=mesh)
    shards = gradwire.attach_fsdp(model, job.spec, nan_policy="raise", checksum=job.checksum)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    parts: dict[str, Stateful] = {"model": _Shards(model, optimizer), "link": shards}
    return Training(model, optimizer, parts, closing(_Detaching(shards.detach)))


def local(job: Job) -> Training:
    model = mlp(job.width)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    method = gradwire.local.QsparseLocalSGD(model, optimizer, job.spec, sync_every=SYNC_EVERY)
    return Training(
        model, optimizer, {"model": model, "optimizer": optimizer, "method": method}, method
    )


def asynchronous(job: Job) -> Training:
    model = mlp(job.width)
    optimizer = SGD(model.parameters(), lr=0.02)
    method = gradwire.local.AsyncQsparseLocalSGD(
        model, optimizer, job.spec, sync_every=SYNC_EVERY, timeout_s=job.timeout_s
    )
    return Training(
        model, optimizer, {"model": model, "optimizer": optimizer, "method": method}, method
    )


TRAININGS: Mapping[JobKind, Callable[[Job], Training]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "local": local,
    "async": asynchronous,
}


@dataclass(frozen=True)
class _Detaching:
    close: Callable[[], None]


@dataclass(frozen=True)
class _Shards:
    """This rank's shards of a model and of its optimiser's momentum."""

    model: nn.Module
    optimizer: Optimizer

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {
                "shard": _local(parameter.detach()).clone(),
                **{
                    key: _local(tensor).clone()
                    for key, tensor in self.optimizer.state[parameter].items()
                },
            }
            for name, parameter in self.model.named_parameters()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name, parameter in self.model.named_parameters():
            own = dict(state[name])
            with torch.no_grad():
                _local(parameter).copy_(own.pop("shard"))
            for key, tensor in own.items():
                like = torch.empty_like(parameter)
                _local(like).copy_(tensor)
                self.optimizer.state[parameter][key] = like


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run(*jobs: tuple[Job, Fault | None], restarts: int = 0) -> None:
    """Runs jobs one after the other, in one process group; `restarts` is noted in their events."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=jobs[0][0].timeout_s))
    try:
        for job, fault in jobs:
            train(job, fault, restarts)
    except Exception as error:
        emit(event="error", kind=type(error).__name__, text=str(error), threads=_threads())
        raise
    dist.destroy_process_group()


def train(job: Job, fault: Fault | None, restarts: int) -> None:
    rank = dist.get_rank()
    training = TRAININGS[job.kind](job)
    files = gradwire.Checkpoints(job.folder or "", rank, dist.get_world_size())
    first = _resume(job, files, training)
    emit_event = partial(emit, folder=job.folder, restarts=restarts)
    emit_event(event="begin", step=first)
    own_fault = fault if fault is not None and fault.rank == rank else None
    injector = FaultInjector(own_fault, training.model)
    with training.context:
        for step in range(first, job.steps):
            injector.step(step)
            time.sleep(job.lazy.get(str(rank), 0.0))
            training.optimizer.zero_grad()
            inputs, labels = batch(step, rank)
            loss = nn.functional.cross_entropy(training.model(inputs), labels)
            injector.before_backward()
            loss.backward()
            training.optimizer.step()
            emit_event(event="step", step=step, loss=float(loss).hex())
            if job.folder and (step + 1) % job.every == 0:
                injector.before_save()
                parts = training.parts.items()
                files.save(step + 1, {name: part.state_dict() for name, part in parts})
        emit_event(event="end", weights=_digest(training.model))


def _resume(job: Job, files: gradwire.Checkpoints, training: Training) -> int:
    """Loads the newest checkpoint; returns its step, or 0."""
    if not job.folder:
        return 0
    if job.kind == "async":
        # These workers need no common step: each continues from its own.
        first = max(files.steps(), default=0)
        state = files.load(first) if first else {}
    else:
        found = files.resume()
        first, state = (0, {}) if found is None else found
    if first:
        for name, part in training.parts.items():
            part.load_state_dict(state[name])
    return first


def _digest(model: nn.Module) -> str:
    content = sha256()
    for parameter in model.parameters():
        content.update(_local(parameter.detach()).numpy().tobytes())
    return content.hexdigest()


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t is not threading.main_thread()]
