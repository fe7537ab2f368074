"""What the ranks of the tests of controllers do on mounts other than DDP."""

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


class Mounted(NamedTuple):
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


def by_reducer(spec: str, controller: str) -> Mounted:
    model = network()
    reducer = gradwire.Reducer(model, spec, controller=controller)
    return Mounted(model, sgd(model), reducer, reducer.reduce)


def by_one_line(spec: str, controller: str) -> Mounted:
    model = network()

    def line() -> gradwire.Reducer:
        return gradwire.reduce_gradients(model, spec, controller=controller)

    backward(model, 100)
    return Mounted(model, sgd(model), line(), line)


def by_optimizer(spec: str, controller: str) -> Mounted:
    model = network()
    optimizer = sgd(model)
    reducer = gradwire.wrap_optimizer(optimizer, spec, model=model, controller=controller)
    return Mounted(model, optimizer, reducer)


def by_shards(spec: str, controller: str) -> Mounted:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    shards = gradwire.attach_fsdp(model, spec, controller=controller)
    return Mounted(model, sgd(model), shards)


def by_replicas(spec: str, controller: str) -> Mounted:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh["shard"])
    shards = gradwire.attach_fsdp(model, spec, replicas=mesh["replicate"], controller=controller)
    return Mounted(model, sgd(model), shards)


MOUNTS = {
    "reducer": by_reducer,
    "one line": by_one_line,
    "optimizer": by_optimizer,
    "shards": by_shards,
    "replicas": by_replicas,
}


def train(mounted: Mounted, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        mounted.optimizer.zero_grad()
        backward(mounted.model, step)
        mounted.after_backward()
        mounted.optimizer.step()


def weights(model: nn.Module) -> Tensor:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])


def led(mount: str, spec: str, controller: str) -> tuple[Tensor, Any, str]:
    """The weights after a save, a load and a switch; what the controller said before and after."""
    mounted = MOUNTS[mount](spec, controller)
    handle = mounted.handle
    train(mounted, 0, 6)
    handle.epoch_ended(0.1)
    train(mounted, 6, 2)
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    handle.load_state_dict(torch.load(file, weights_only=True))
    train(mounted, 8, 2)
    explained: Any = handle.stats()["controller"]
    handle.switch(spec.replace("topk", "redsync"))
    train(mounted, 10, 2)
    after = str(handle.stats()["controller"])
    handle.detach()
    return weights(mounted.model), explained, after


def scattered_bytes(controller: str) -> tuple[int, int]:
    """Bytes that two steps send for a reduce-scatter, with a controller and without."""
    found: list[int] = []
    for rule in (controller, None):
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        shards = gradwire.attach_fsdp(model, "topk:ratio=0.1", controller=rule)
        meter = shards._comm.meter
        before = meter.sent_bytes
        train(Mounted(model, sgd(model), shards), 0, 2)
        found.append(meter.sent_bytes - before)
        shards.detach()
    return found[0], found[1]
