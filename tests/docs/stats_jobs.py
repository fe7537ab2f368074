"""Jobs that collect the keys of stats() and metrics() from every kind of handle."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 64) * (step + 1)).square().mean().backward()
        optimizer.step()


def handle_keys() -> tuple[set[str], set[str], set[str]]:
    """Returns the keys of stats(), of a policy's, and of metrics() on a DDP model."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    link = gradwire.attach(model, "*bias*: none; default: topk:ratio=0.1", controller=None)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    [policy, *_] = link.stats()["policies"]
    found = set(link.stats()), set(policy), set(link.metrics())
    link.detach()
    return found


def setting_keys() -> set[str]:
    """Returns keys of stats() with a controller, an optimiser of updates, and FSDP2's weights."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    controller = "schedule:last=0.1"
    link = gradwire.attach(model, "topk:ratio=0.1", controller=controller)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    stats: Mapping[str, object] = link.stats()
    link.detach()
    optimizer = gradwire.optim.AdamW(model, lr=1e-3, compress="topk:ratio=0.1")
    train(model, optimizer)
    sharded = nn.Linear(64, 64)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    shards = gradwire.attach_fsdp(sharded, "none", weights="int8")
    return set(stats) | set(optimizer.gradwire.stats()) | set(shards.stats())


def local_keys(asynchronous: bool) -> tuple[set[str], set[str]]:
    """Returns the keys of stats() and metrics() of a local method."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    local = gradwire.local
    wrap = local.AsyncQsparseLocalSGD if asynchronous else local.QsparseLocalSGD
    with wrap(model, optimizer, "topk:ratio=0.1", sync_every=2) as worker:
        train(model, optimizer, 4)
        metrics = set(worker.metrics())
    return set(worker.stats()), metrics
