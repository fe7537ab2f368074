"""Jobs of the tests of torch.compile, under DDP and FSDP2. Each runs on every rank."""

from typing import Any

import fsdp_weight_jobs as fsdp
import torch
from ddp_jobs import data, failure_of, mlp
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire

BACKEND = "aot_eager"


Run = tuple[list[float], int, int]


def all_ddp(orders: tuple[str, ...]) -> dict[str, Run]:
    return {order: ddp(order) for order in (*orders, "not compiled")}


def all_sharded(orders: tuple[str, ...]) -> tuple[dict[str, Run], dict[str, Run]]:
    """Returns runs with our hooks, and those of plain FSDP2."""
    with_us = {order: sharded(order, attached=True) for order in (*orders, "not compiled")}
    return with_us, {order: sharded(order, attached=False) for order in orders}


def ddp(order: str) -> Run:
    """Returns losses, exchanged steps and compiled graphs of a model compiled in some order."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    # Not a class of torch.nn, of which torch compiles none in place.
    model: Any = fsdp.SmallGPT()
    if order == "module, DDP, attach":
        model = torch.compile(model, backend=BACKEND)
    if order == "in place, DDP, attach":
        model.compile(backend=BACKEND)
    wrapped: Any = DDP(model)
    called = wrapped
    if order == "DDP, compile, attach":
        called = torch.compile(wrapped, backend=BACKEND)
    link = gradwire.attach(wrapped, "topk:ratio=0.1")
    if order == "DDP, attach, compile":
        called = torch.compile(wrapped, backend=BACKEND)
    if order == "DDP, attach, in place":
        wrapped.module.compile(backend=BACKEND)
    losses = fsdp.train(called, fsdp.optimizer_of(wrapped), 4)
    steps: Any = link.stats()["steps"]
    link.detach()
    return losses, steps, counters["stats"]["unique_graphs"]


def bypassed() -> str:
    """Trains with compiled autograd's own reducer, which calls hooks without buckets."""
    torch._dynamo.reset()
    settings: Any = torch._dynamo.config
    with settings.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        model = DDP(mlp())
        gradwire.attach(model, "topk:ratio=0.1")
        compiled = torch.compile(model, backend=BACKEND)
        x, y = data(0, torch.distributed.get_rank())
        return failure_of(lambda: nn.functional.cross_entropy(compiled(x), y).backward())


def sharded(order: str, *, attached: bool) -> Run:
    """Does the same with FSDP2, both legs compressed, or without us."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model: Any = fsdp.SmallGPT()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if order == "blocks, shard, attach":
        for block in model.blocks:
            block.compile(backend=BACKEND)
    if order == "wrapped blocks, shard, attach":
        model.blocks = nn.ModuleList(torch.compile(b, backend=BACKEND) for b in model.blocks)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    called = model
    if order == "shard, compile, attach":
        called = torch.compile(model, backend=BACKEND)
    shards = gradwire.attach_fsdp(called, "int4", weights="int8") if attached else None
    if order == "shard, attach, compile":
        called = torch.compile(model, backend=BACKEND)
    losses = fsdp.train(called, fsdp.optimizer_of(model), 3)
    steps: Any = 0 if shards is None else shards.stats()["steps"]
    return losses, steps, counters["stats"]["unique_graphs"]
