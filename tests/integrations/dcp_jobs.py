"""Jobs that save and resume by torch.distributed.checkpoint. Each runs on every rank."""

from typing import Any

import ddp_jobs as jobs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.local import BlockCSER, DiLoCo, QsparseLocalSGD, SparseLoCo

LOCAL: dict[str, Any] = {
    "qsparse": lambda m, o: QsparseLocalSGD(m, o, "topk:ratio=0.1 | qsgd:bits=4", sync_every=4),
    "late": lambda m, o: QsparseLocalSGD(m, o, "int4", sync_every=4, delay=2),
    "cser": lambda m, o: BlockCSER(
        m, o, "grbs:ratio=0.1,block=16", "grbs:ratio=0.25,block=16", sync_every=4
    ),
    "streaming": lambda m, o: DiLoCo(m, o, "fp16", sync_every=4, fragments=2, delay=1),
    "sparseloco": lambda m, o: SparseLoCo(m, o, "chunktopk:k=8,chunk=64 | codebook", sync_every=4),
}


def same(one: Any, other: Any) -> bool:
    """Returns whether two nested structures are equal, tensors bit by bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def controlled(folder: str, controller: str, steps: int) -> tuple[bool, bool]:
    """Returns whether a controlled link's state is restored, and training continues equally."""
    model = DDP(jobs.mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, "topk:ratio=0.1", controller=controller)
    jobs.train(model, steps)
    link.epoch_ended(0.1)
    saved = link.state_dict()
    dcp.save({"model": model.module.state_dict(), "link": saved}, checkpoint_id=folder)
    jobs.train(model, 3, first=steps)
    link.detach()

    fresh = DDP(jobs.mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(fresh, "topk:ratio=0.1", controller=controller)
    state = {"model": fresh.module.state_dict(), "link": link.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    fresh.module.load_state_dict(state["model"])
    link.load_state_dict(state["link"])
    back = same(saved, link.state_dict())
    jobs.train(fresh, 3, first=steps)
    link.detach()
    return back, torch.equal(jobs.weights(model), jobs.weights(fresh))


def local(folder: str, name: str, steps: int) -> tuple[bool, bool]:
    """Returns whether a local optimiser's state is restored, and training continues equally."""
    first, optimizer, worker = _begun(name)
    rank = f"rank{dist.get_rank()}"
    with worker:
        _steps(first, optimizer, 0, steps)
        saved = worker.state_dict()
        own = {"model": first.state_dict(), "optimizer": optimizer.state_dict()["state"]}
        dcp.save({"worker": saved, rank: own}, checkpoint_id=folder)
        _steps(first, optimizer, steps, 6)

    again, optimizer, worker = _begun(name)
    state: dict[str, Any] = {"worker": worker.state_dict(), rank: {"model": again.state_dict()}}
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state[rank]["model"])
    worker.load_state_dict(state["worker"])
    back = same(saved, worker.state_dict())
    with worker:
        _steps(again, optimizer, steps, 6)
    return back, torch.equal(jobs.weights(first), jobs.weights(again))


def _begun(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = jobs.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, LOCAL[name](model, optimizer)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        jobs.loss_of(model, step).backward()
        optimizer.step()
