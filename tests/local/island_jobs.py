"""Jobs of four real ranks that train on two islands, whose models are sharded over two ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from local_jobs import METHODS as ALL_SYNCHRONOUS
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.local import DiLoCo, simulated
from gradwire.local.base import LocalMethod
from gradwire.local.island import local_part

LR = 0.05

METHODS = {
    **ALL_SYNCHRONOUS,
    "diloco-none": (DiLoCo, ("none",), {"sync_every": 4}),
    "powersgd": (DiLoCo, ("powersgd:rank=2",), {"sync_every": 4}),
}


class Uneven(nn.Module):
    """A model whose tensors do not divide by two ranks, with tied, frozen and plain tensors.

    The last rank's part of the `narrow` layer is empty.
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first, self.second = nn.Linear(40, 101), nn.Linear(101, 101)
        self.third = nn.Linear(101, 101, bias=False)
        self.third.weight = self.second.weight
        self.frozen = nn.Linear(101, 101).requires_grad_(False)
        self.narrow, self.last = nn.Linear(101, 1), nn.Linear(101, 32)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.third(self.second(self.first(x).tanh()).tanh()) + self.frozen(
            x.repeat(1, 3)[:, :101]
        )
        out: Tensor = self.last(hidden * self.narrow(hidden).tanh()) * self.scale.mean()
        return out


def uneven() -> nn.Module:
    torch.manual_seed(0)
    return Uneven()


def island_mesh() -> DeviceMesh:
    """Returns two islands of two ranks; the last dimension is that of a single rank."""
    return init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("islands", "inside", "single"))


def sharded(mesh: DeviceMesh) -> nn.Module:
    """Returns the model, sharded by `fully_shard`."""
    model = uneven()
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


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
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LR, momentum=0.5)
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
    "fsdp": lambda mesh: sharded(mesh["inside"]),
    "hsdp": lambda mesh: sharded(mesh["inside", "single"]),
    "plain": lambda _: uneven(),
}


def trained(kind: str, name: str, steps: int) -> tuple[dict[str, Tensor], Any, dict[str, Tensor]]:
    """Returns this rank's parts after some steps, the statistics, and the whole parameters."""
    mesh = island_mesh()
    model = MODELS[kind](mesh)
    optimizer, worker = build(name, model, mesh["islands"])
    with worker:
        train(model, optimizer, mesh["islands"].get_local_rank(), range(steps))
        return parts(model), worker.stats(), wholes(model)


def common_parts(name: str, steps: int) -> list[dict[str, Tensor]]:
    """Returns this rank's parts of what is equal in all islands: at the start, and at the end."""
    mesh = island_mesh()
    model = sharded(mesh["inside"])
    optimizer, worker = build(name, model, mesh["islands"])
    found = []
    with worker:
        for count in (0, steps):
            train(model, optimizer, mesh["islands"].get_local_rank(), range(count))
            found.append({key: part.clone() for key, part in worker._common().items()})
    return found


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def cut_short(folder: str, name: str, kinds: tuple[str, str], steps: int) -> tuple[bool, ...]:
    """Returns whether a run that is saved and resumed by DCP ends bitwise as one without a break.

    The resumed run may have another layout inside its islands.
    """
    mesh = island_mesh()
    island = mesh["islands"].get_local_rank()
    model = MODELS[kinds[0]](mesh)
    optimizer, worker = build(name, model, mesh["islands"])
    with worker:
        train(model, optimizer, island, range(steps))
        dcp.save(
            {f"island{island}": _state(model, optimizer), "worker": worker.state_dict()},
            checkpoint_id=folder,
        )
        train(model, optimizer, island, range(steps, 2 * steps))
        whole = wholes(model)

    model = MODELS[kinds[1]](mesh)
    optimizer, worker = build(name, model, mesh["islands"])
    state: Any = {f"island{island}": _state(model, optimizer), "worker": worker.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    own = state[f"island{island}"]
    set_state_dict(
        model, optimizer, model_state_dict=own["model"], optim_state_dict=own["optimizer"]
    )
    worker.load_state_dict(state["worker"])
    with worker:
        train(model, optimizer, island, range(steps, 2 * steps))
        resumed = wholes(model)
    return tuple(torch.equal(whole[key], resumed[key]) for key in whole)


def resharded(folder: str, name: str, kinds: tuple[str, str]) -> tuple[int, bool]:
    """Returns how many DTensors a state has, and whether all are equal in another layout."""
    mesh = island_mesh()
    model = MODELS[kinds[0]](mesh)
    optimizer, worker = build(name, model, mesh["islands"])
    with worker:
        train(model, optimizer, mesh["islands"].get_local_rank(), range(5))
        state = worker.state_dict()
        dcp.save({"worker": state}, checkpoint_id=folder)
    _, other = build(name, MODELS[kinds[1]](mesh), mesh["islands"])
    loaded: Any = {"worker": other.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded["worker"])
    before, after = whole_tensors(state), whole_tensors(other.state_dict())
    return len(before), before.keys() == after.keys() and all(
        torch.equal(before[key], after[key]) for key in before
    )


def whole_tensors(state: Any, path: str = "") -> dict[str, Tensor]:
    """Returns the DTensors of a state by path, gathered inside the island."""
    if isinstance(state, DTensor):
        return {path: state.full_tensor()}
    entries = dict(enumerate(state)) if isinstance(state, list) else state
    found: dict[str, Tensor] = {}
    for key, value in entries.items() if isinstance(entries, dict) else ():
        found |= whole_tensors(value, f"{path}.{key}")
    return found


def trained_tensor_parallel(steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Returns this rank's parts with tensor parallelism, whole ones, and those of whole models."""
    mesh = island_mesh()
    island, found = mesh["islands"].get_local_rank(), []
    for is_parallel in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 32))
        if is_parallel:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, mesh["inside"], plan)
        optimizer, worker = build("diloco-none", model, mesh["islands"])
        with worker:
            train(model, optimizer, island, range(steps))
            found.append((parts(model), wholes(model), worker.stats()))
    (own, whole, _), (_, plain, _) = found
    return own, whole, plain


def evaluated(evaluates: bool) -> tuple[dict[str, Tensor], float]:
    """Returns the parameters after training with or without evaluations, and the last loss."""
    mesh = island_mesh()
    model = sharded(mesh["inside"])
    optimizer, worker = build("diloco-none", model, mesh["islands"])
    loss = 0.0
    with worker:
        for step in range(6):
            if evaluates:
                with worker.averaged(), torch.no_grad():
                    inputs, targets = data(99, 0)
                    loss = float(nn.functional.mse_loss(model(inputs), targets))
            train(model, optimizer, mesh["islands"].get_local_rank(), range(step, step + 1))
    return wholes(model), loss


def nonfinite_shard(name: str) -> tuple[str, bool]:
    """Returns the error on this rank if one shard has a NaN, and whether nothing was synchronised.

    Rank 3 has the NaN; only rank 1 receives anything of it.
    """
    mesh = island_mesh()
    model = sharded(mesh["inside"])
    optimizer, worker = build(name, model, mesh["islands"])
    with worker:
        train(model, optimizer, mesh["islands"].get_local_rank(), range(3))
        before = whole_tensors(worker.state_dict())
        if dist.get_rank() == 3:
            local_part(model.first.weight)[0, 0] = float("nan")
        text = ""
        try:
            optimizer.step()
        except NonFiniteError as error:
            text = str(error)
        local_part(model.first.weight).nan_to_num_()
        after = whole_tensors(worker.state_dict())
        same = [torch.equal(before[key], after[key]) for key in before]
        return text, bool(same) and all(same)


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""


def _entered(model: nn.Module, group: Any, name: str = "diloco-none", **others: Any) -> None:
    _, worker = build(name, model, group, **others)
    with worker:
        pass


def refusals() -> dict[str, str]:
    """Returns the errors of models and groups that make no islands."""
    mesh, rank = island_mesh(), dist.get_rank()
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][rank in (1, 2)]
    over = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    odd = mesh["inside"] if rank < 2 else mesh["inside", "single"]
    fsdp = mesh["inside"]
    tests: dict[str, Callable[[], object]] = {
        "two dimensions": lambda: build("local", sharded(fsdp), mesh["islands", "inside"]),
        "over all": lambda: build("local", sharded(fsdp), dist.group.WORLD),
        "hsdp over islands": lambda: build("local", sharded(over), mesh["islands"]),
        "simulated": lambda: build("local", sharded(fsdp), simulated(1)[0]),
        "crossed": lambda: _entered(sharded(fsdp), crossed),
        "other layouts": lambda: _entered(sharded(odd), mesh["islands"]),
        "one rank": lambda: _entered(sharded(fsdp), mesh["islands"], seed=int(rank == 0)),
        "small shards": lambda: _too_small(mesh),
    }
    return {name: _error_of(action) for name, action in tests.items()}


def _too_small(mesh: DeviceMesh) -> None:
    """Compresses a parameter of three rows, of which one rank's shard is too small for that."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(Plan.min_numel * 3 // 4, 3), mesh=mesh["inside"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    policies = {"weight": "topk:ratio=0.1", "*": "none"}
    DiLoCo(model, optimizer, policies, sync_every=4, process_group=mesh["islands"])
