"""A training script that saves and resumes, as a user would write it, with fault injection."""

import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from fault_injection import Fault, FaultInjector, emit
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire


@dataclass(frozen=True)
class Job:
    """Settings of the training run; without a `folder` nothing is saved."""

    folder: str | None = None
    steps: int = 8
    every: int = 2
    spec: str = "topk:ratio=0.1"
    exchange: str = "auto"
    width: int = 256
    timeout_s: float = 6.0
    lazy: dict[str, float] = field(default_factory=dict)
    """Seconds that a rank sleeps before every step."""


def mlp(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 64, generator=generator)
    return x, torch.randint(10, (16,), generator=generator)


def train(*jobs: tuple[Job, Fault | None]) -> None:
    """Runs jobs one after the other, in one process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=jobs[0][0].timeout_s))
    try:
        for job, fault in jobs:
            _train(job, fault)
    except RuntimeError as error:
        emit(event="error", kind=type(error).__name__, text=str(error), threads=_threads())
        raise
    dist.destroy_process_group()


def _train(job: Job, fault: Fault | None) -> None:
    rank = dist.get_rank()
    model = DDP(mlp(job.width), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    link = gradwire.attach(model, job.spec, exchange=job.exchange)
    parts: dict[str, Any] = {"model": model.module, "optimizer": optimizer, "link": link}
    files = gradwire.Checkpoints(job.folder or "", rank, dist.get_world_size())
    first = 0
    if job.folder and (found := files.resume()):
        first, state = found
        for name, part in parts.items():
            part.load_state_dict(state[name])
    emit_event = partial(emit, folder=job.folder, restarts=restarts())
    emit_event(event="begin", step=first)
    injector = FaultInjector(
        fault if fault is not None and fault.rank == rank else None, model, link
    )
    for step in range(first, job.steps):
        injector.step(step)
        time.sleep(job.lazy.get(str(rank), 0.0))
        optimizer.zero_grad()
        x, y = batch(step, rank)
        loss = nn.functional.cross_entropy(model(x), y)
        injector.before_backward()
        loss.backward()
        optimizer.step()
        emit_event(event="step", step=step, loss=loss.item().hex())
        if job.folder and (step + 1) % job.every == 0:
            injector.before_save()
            files.save(step + 1, {name: part.state_dict() for name, part in parts.items()})
    emit_event(event="end", weights=_digest(model))
    link.detach()


def restarts() -> int:
    """Returns how often torchrun has restarted this job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _digest(model: nn.Module) -> str:
    content = sha256()
    for parameter in model.parameters():
        content.update(parameter.detach().numpy().tobytes())
    return content.hexdigest()


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t is not threading.main_thread()]


if __name__ == "__main__":
    faults = [(Job(**job), fault and Fault(**fault)) for job, fault in json.loads(sys.argv[1])]
    # Only torchrun's first attempt has a fault.
    train(*((job, None if restarts() else fault) for job, fault in faults))
