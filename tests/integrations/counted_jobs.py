"""Jobs of the tests of byte counts. Each runs on every rank."""

from typing import Any

import torch.distributed as dist
from ddp_jobs import grads, loss_of, mlp
from fsdp_jobs import both, sharded, train
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.integrations.handle import Handle


def counted_job(
    integration: str, spec: str, exchange: str, steps: int
) -> tuple[list[dict[str, Tensor]], dict[str, object]]:
    """Returns the local gradients of all steps, and the statistics after their exchange."""
    local, model = [], mlp()
    handle: Handle
    if integration == "ddp":
        ddp = DDP(model)
        handle = gradwire.attach(ddp, spec, exchange=exchange)
    else:
        handle = gradwire.Reducer(
            model, spec, exchange=exchange, find_unused_parameters=False, check_every=2
        )
    for step in range(steps):
        plain = mlp()
        loss_of(plain, step).backward()
        local.append(grads(plain))
        model.zero_grad()
        loss_of(ddp if integration == "ddp" else model, step).backward()
        if isinstance(handle, gradwire.Reducer):
            handle.reduce()
    # Neither a switch nor a load is traffic of the method.
    handle.load_state_dict(handle.state_dict())
    handle.switch(spec, exchange=exchange)
    stats = handle.stats()
    handle.detach()
    return local, stats


def fsdp_ratio_job(spec: str, replicated: bool) -> tuple[Any, int]:
    """Returns statistics after two steps, and the bytes that FSDP2 itself would send in them."""
    mesh = both()
    model = sharded(mesh["shard"] if replicated else None)
    replicas = mesh["replicate"] if replicated else None
    shards = gradwire.attach_fsdp(model, spec, replicas=replicas)
    ranks = 2 if replicated else dist.get_world_size()
    nbytes = 0
    for unit in shards._units:
        own = sum(shape.numel() for shape in unit.shapes) * unit.dtype.itemsize
        # An all-reduce of the shard, or a reduce-scatter of the shards of all ranks.
        nbytes += 2 * (ranks - 1) * own // ranks if replicated else (ranks - 1) * own
    train(model, 2)
    stats = shards.stats()
    shards.detach()
    return stats, 2 * nbytes
