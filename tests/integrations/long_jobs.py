"""Jobs of the long runs, and the resources that they hold afterwards."""

import gc
import os
import resource
import threading
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import ddp_jobs as jobs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.integrations.comm_runner import _complete


class Held(NamedTuple):
    """Resources that a process holds."""

    files: int
    threads: int
    groups: int
    rss_kb: int


def held() -> Held:
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    groups = len(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else 0
    return Held(files, threads, groups, pages * resource.getpagesize() // 1024)


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 4))


def one_step(model: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    model(torch.randn(4, 32, generator=generator)).square().mean().backward()
    optimizer.step()


def pair() -> dist.ProcessGroup | None:
    """Returns a group of the first two ranks, which are enough; None on other ranks."""
    group = dist.new_group([0, 1])
    return group if dist.get_rank() < 2 else None


def attach_again_job(times: int) -> tuple[Held, Held] | None:
    """Attaches and detaches one model `times` times, with some switches and steps in between."""
    if (group := pair()) is None:
        return None
    model = DDP(tiny(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = None
    for number in range(times):
        link = gradwire.attach(model, "topk:ratio=0.1")
        if number % 20 == 0:
            one_step(model, optimizer, number)
            link.switch("efsign")
            one_step(model, optimizer, number + 1)
        link.detach()
        if number == times // 10:
            before = held()
    assert before is not None
    return before, held()


def switch_job(times: int) -> tuple[Held, Held, int] | None:
    if (group := pair()) is None:
        return None
    model = DDP(tiny(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = gradwire.attach(model, "topk:ratio=0.1")
    before = None
    for number in range(times):
        link.switch(("efsign", "topk:ratio=0.1", "powersgd:rank=1", "qsgd:bits=4")[number % 4])
        if number % 20 == 0:
            one_step(model, optimizer, number)
        if number == times // 10:
            before = held()
    steps = link.stats()["steps"]
    link.detach()
    assert before is not None
    assert isinstance(steps, int)
    return before, held(), steps


def fresh_models_job(times: int, detach: bool) -> tuple[Held, Held] | None:
    """Makes a new model every time, as in a search for settings; some are never detached."""
    if (group := pair()) is None:
        return None
    before = None
    for number in range(times):
        model = DDP(tiny(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        link = gradwire.attach(model, "topk:ratio=0.1")
        one_step(model, optimizer, number)
        if detach:
            link.detach()
        del model, optimizer, link
        if number == times // 10:
            before = held()
    assert before is not None
    return before, held()


def steps_job(count: int) -> tuple[Held, Held, list[float]] | None:
    """Runs `count` steps; returns resources after a tenth and at the end, and times of tenths."""
    if (group := pair()) is None:
        return None
    model = DDP(tiny(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    link = gradwire.attach(model, "topk:ratio=0.1")
    before, times = None, []
    for tenth in range(10):
        start = perf_counter()
        for step in range(count // 10):
            one_step(model, optimizer, tenth * count + step)
        times.append(perf_counter() - start)
        before = before or held()
    assert link.stats()["steps"] == count
    link.detach()
    assert before is not None
    return before, held(), times


def several_models_job() -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Trains three models alternately and alone; returns weights and the number of threads."""
    specs = ("topk:ratio=0.1", "efsign", "powersgd:rank=1")
    alone = []
    for spec in specs:
        model = DDP(tiny())
        link = gradwire.attach(model, spec)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            one_step(model, optimizer, step)
        link.detach()
        alone.append(jobs.weights(model))
    models = [DDP(tiny()) for _ in specs]
    links = [gradwire.attach(m, spec) for m, spec in zip(models, specs, strict=True)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            one_step(model, optimizer, step)
    runners = sum(t.name == "gradwire-comm" for t in threading.enumerate())
    for link in links:
        link.detach()
    return alone, [jobs.weights(m) for m in models], runners


def lost_group_job() -> tuple[bool, bool]:
    """Returns whether a group is reused after a detach, and replaced after a failure."""
    model = DDP(tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = gradwire.attach(model, "topk:ratio=0.1")
    first.detach()
    second = gradwire.attach(model, "topk:ratio=0.1")
    reused = second._comm.group is first._comm.group

    def broken(*_: object) -> None:
        raise gradwire.WireError("bad bytes")

    if dist.get_rank() == 1:
        second._runner._add = broken  # type: ignore[attr-defined]
    else:
        # The others would wait for rank 1, which runs no collective.
        second._runner._add = lambda _, programs, buckets, is_last: _complete(buckets)  # type: ignore[attr-defined]
    text = jobs.failure_of(lambda: one_step(model, optimizer, 0))
    assert text.startswith("WireError") == (dist.get_rank() == 1)
    second.detach()
    third = gradwire.attach(model, "topk:ratio=0.1")
    one_step(model, optimizer, 1)
    fresh = third._comm.group is not second._comm.group
    third.detach()
    return reused, fresh
