"""Jobs of the controller tests for integrations other than DDP."""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from control_jobs import network
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gradwire
from gradwire.integrations.handle import Handle


class Integrated(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    handle: Handle
    after_backward: Callable[[], object] = lambda: None


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(16, 64, generator=generator)
    y = torch.randint(10, (16,), generator=generator)
    nn.functional.cross_entropy(model(x), y).backward()


def by_reducer(spec: str, controller: str) -> Integrated:
    model = network()
    reducer = gradwire.Reducer(model, spec, controller=controller)
    return Integrated(model, sgd(model), reducer, reducer.reduce)


def by_reduce_gradients(spec: str, controller: str) -> Integrated:
    model = network()

    def reduce() -> gradwire.Reducer:
        return gradwire.reduce_gradients(model, spec, controller=controller)

    backward(model, 100)
    return Integrated(model, sgd(model), reduce(), reduce)


def by_optimizer(spec: str, controller: str) -> Integrated:
    model = network()
    optimizer = gradwire.wrap_optimizer(sgd(model), spec, model=model, controller=controller)
    return Integrated(model, optimizer, gradwire.handle_of(optimizer))


def by_shards(spec: str, controller: str) -> Integrated:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    shards = gradwire.attach_fsdp(model, spec, controller=controller)
    return Integrated(model, sgd(model), shards)


def by_replicas(spec: str, controller: str) -> Integrated:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh["shard"])
    shards = gradwire.attach_fsdp(model, spec, replicas=mesh["replicate"], controller=controller)
    return Integrated(model, sgd(model), shards)


INTEGRATIONS = {
    "reducer": by_reducer,
    "reduce_gradients": by_reduce_gradients,
    "optimizer": by_optimizer,
    "shards": by_shards,
    "replicas": by_replicas,
}


def train(integrated: Integrated, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        integrated.optimizer.zero_grad()
        backward(integrated.model, step)
        integrated.after_backward()
        integrated.optimizer.step()


def weights(model: nn.Module) -> Tensor:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])


def controlled_run(integration: str, spec: str, controller: str) -> tuple[Tensor, Any, str]:
    """Returns weights after a save, a load and a switch, and stats before and after the switch."""
    integrated = INTEGRATIONS[integration](spec, controller)
    handle = integrated.handle
    train(integrated, 0, 6)
    handle.epoch_ended(0.1)
    train(integrated, 6, 2)
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    handle.load_state_dict(torch.load(file, weights_only=True))
    train(integrated, 8, 2)
    explained: Any = handle.stats()["controller"]
    handle.switch(spec.replace("topk", "redsync"))
    train(integrated, 10, 2)
    after = str(handle.stats()["controller"])
    handle.detach()
    return weights(integrated.model), explained, after


def reduce_scatter_bytes(controller: str) -> tuple[int, int]:
    """Returns the bytes that two steps send, with a controller and without."""
    found: list[int] = []
    for choice in (controller, None):
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        shards = gradwire.attach_fsdp(model, "topk:ratio=0.1", controller=choice)
        meter = shards._comm.meter
        before = meter.sent_bytes
        train(Integrated(model, sgd(model), shards), 0, 2)
        found.append(meter.sent_bytes - before)
        shards.detach()
    return found[0], found[1]
