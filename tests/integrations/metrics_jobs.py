"""Jobs of the tests of `metrics`. Each runs on every rank and returns plain values."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from ddp_jobs import loss_of, mlp, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

import gradwire

Rows = list[dict[str, float]]


def ddp_rows(spec: str, steps: int, options: dict[str, Any]) -> tuple[Rows, dict[str, object]]:
    """Returns the metrics of every step of a DDP model, and its statistics at the end."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, spec, **options)
    rows = [link.metrics()]
    for step in range(steps):
        train(model, 1, step)
        rows.append(link.metrics())
    stats = link.stats()
    link.detach()
    return rows, stats


def other_rows(kind: str) -> tuple[Rows, dict[str, object]]:
    """Returns the metrics of three steps of another integration, and its statistics."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle: Any
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = gradwire.attach_fsdp(model, "powersgd:rank=2")
    elif kind == "wrap_optimizer":
        gradwire.wrap_optimizer(optimizer, "powersgd:rank=2", model=model)
        handle = gradwire.handle_of(optimizer)
    else:
        handle = gradwire.local.QsparseLocalSGD(model, optimizer, "topk:ratio=0.1", sync_every=2)
        handle.__enter__()
    rows = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        rows.append(handle.metrics("gradwire/"))
    stats = handle.stats()
    handle.__exit__(None) if kind == "local" else handle.detach()
    return rows, stats


def traced(chunked: bool) -> set[str]:
    """Returns the names of our ranges in a trace of all threads, or of this one."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, "powersgd:rank=2") if chunked else None
    reducer = None if chunked else gradwire.Reducer(model.module, "powersgd:rank=2")
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=chunked)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as trace:
        train(model, 1)
        if reducer is not None:
            reducer.reduce()
    for handle in (link, reducer):
        if handle is not None:
            handle.detach()
    return {event.key for event in trace.key_averages() if event.key.startswith("gradwire::")}


class Lines(logging.Handler):
    """Collects the lines of a logger."""

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged_lines() -> list[str]:
    """Returns what a run with a non-finite gradient logs at level INFO on this rank."""
    logger, lines = logging.getLogger("gradwire"), Lines()
    before = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    model = DDP(mlp())
    link = gradwire.attach(model, "topk:ratio=0.1")
    train(model, 1)
    (loss_of(model, 1) * float("nan")).backward()
    link.stats()
    link.switch("none")
    link.detach()
    logger.removeHandler(lines)
    logger.setLevel(before)
    return lines.lines
