"""Jobs of four real ranks that train on two islands, whose models are sharded over two ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from local_jobs import METHODS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gradwire.local.base import LocalMethod
from gradwire.local.island import local_part

LR = 0.05


class Uneven(nn.Module):
    """A model whose tensors do not divide by two ranks, with tied, frozen and plain tensors.

    The last rank's part of the `narrow` layer is empty.
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first, self.second = nn.Linear(40, 31), nn.Linear(31, 31)
        self.third = nn.Linear(31, 31, bias=False)
        self.third.weight = self.second.weight
        self.frozen = nn.Linear(31, 31).requires_grad_(False)
        self.narrow, self.last = nn.Linear(31, 1), nn.Linear(31, 32)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.third(self.second(self.first(x).tanh()).tanh()) + self.frozen(x[:, :31])
        out: Tensor = self.last(hidden * self.narrow(hidden).tanh()) * self.scale.mean()
        return out


def uneven() -> nn.Module:
    torch.manual_seed(0)
    return Uneven()


def island_mesh() -> DeviceMesh:
    """Returns two islands of two ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("islands", "inside"))


def sharded(mesh: DeviceMesh) -> nn.Module:
    """Returns the model, sharded by `fully_shard`."""
    model = uneven()
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    """Returns a model with a matrix of each kind of placement, and plain tensors."""
    model = uneven()
    for layer, placement in (
        (model.first, Shard(0)),
        (model.last, Shard(1)),
        (model.narrow, Replicate()),
    ):
        own = distribute_tensor(layer.weight.detach(), mesh, [placement])
        layer.weight = nn.Parameter(own)
    return model


def data(step: int, island: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + island)
    inputs = torch.randn(16, 40, generator=generator)
    target = torch.randn(40, 32, generator=torch.Generator().manual_seed(7)) / 6
    return inputs, inputs @ target


def train(model: nn.Module, optimizer: torch.optim.Optimizer, island: int, steps: range) -> None:
    """Trains with the same data on all ranks of an island, so that it is one worker."""
    for step in steps:
        inputs, targets = data(step, island)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def build(
    name: str, model: nn.Module, group: dist.ProcessGroup | DeviceMesh, **others: Any
) -> tuple[torch.optim.Optimizer, LocalMethod]:
    method, args, settings = METHODS[name]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    return optimizer, method(model, optimizer, *args, process_group=group, **settings, **others)


def parts(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of this rank's parts of all parameters."""
    return {name: local_part(p).clone() for name, p in model.named_parameters()}


def wholes(model: nn.Module) -> dict[str, Tensor]:
    """Returns the whole parameters, gathered inside the island."""
    return {
        name: (p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()).clone()
        for name, p in model.named_parameters()
    }


MODELS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "fsdp": sharded,
    "plain": lambda _: uneven(),
}


def trained(kind: str, name: str, steps: int) -> tuple[dict[str, Tensor], Any, dict[str, Tensor]]:
    """Returns this rank's parts after some steps, the statistics, and the whole parameters."""
    mesh = island_mesh()
    model = MODELS[kind](mesh["inside"])
    optimizer, worker = build(name, model, mesh["islands"])
    with worker:
        train(model, optimizer, mesh["islands"].get_local_rank(), range(steps))
        return parts(model), worker.stats(), wholes(model)
