"""Jobs of the FSDP2 tests. Each runs on every rank."""

import io
from typing import Any

import torch
import torch.distributed as dist
from ddp_jobs import failure_of, loss_of, mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire


def sharded(mesh: DeviceMesh | None = None, **options: Any) -> nn.Sequential:
    """Makes a model of three units: two layers, and the root with the last, which needs padding."""
    model = mlp()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.full_tensor().detach() for name, tensor in tensors.items()}


def grads(model: nn.Module) -> dict[str, Tensor]:
    return whole({name: p.grad for name, p in model.named_parameters()})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([w.reshape(-1) for w in whole(dict(model.named_parameters())).values()])


def train(model: nn.Module, steps: int, first: int = 0, every: int = 1) -> list[float]:
    """Returns losses by step; the batch changes `every` step, or never for 0."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step * every)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def dense_mean(steps: int = 1, scale: float = 1.0) -> dict[str, Tensor]:
    """Returns the mean gradient of a model that is not sharded."""
    model = mlp()
    for step in range(steps):
        loss_of(model, step).backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        found[name] = parameter.grad * scale / dist.get_world_size()
    return found


def close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5) -> bool:
    pairs = [(found[name], expected[name]) for name in expected]
    return all(torch.allclose(a.float(), b, rtol=rtol, atol=rtol / 10) for a, b in pairs)


def scattered_job(spec: str) -> tuple[Tensor, list[float], float, str]:
    model = sharded()
    shards = gradwire.attach_fsdp(model, spec)
    losses = train(model, 6, every=0)
    stats: Any = shards.stats()
    assert stats["steps"] == 6
    shards.detach()
    train(model, 1, first=6)
    return weights(model), losses, stats["ratio"], stats["spec"]


def dense_job() -> dict[str, bool]:
    """Returns whether `none` equals plain FSDP2: every operation, accumulation, 16-bit sums."""
    found = {}
    for name, spec in (("plain", "none"), ("rank", "powersgd:rank=1000")):
        model = sharded()
        gradwire.attach_fsdp(model, spec)
        loss_of(model, 0).backward()
        found[name] = close(grads(model), dense_mean(), 1e-4)
    model = sharded()
    gradwire.attach_fsdp(model, "none")
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, 1).backward()
    found["accumulated"] = close(grads(model), dense_mean(2))
    model = sharded()
    gradwire.attach_fsdp(model, "none")
    model.apply(lambda m: _divide(m, 16.0))
    loss_of(model, 0).backward()
    found["divided"] = close(grads(model), dense_mean(scale=dist.get_world_size() / 16))
    model = sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    gradwire.attach_fsdp(model, "none")
    loss_of(model, 0).backward()
    found["fp16"] = close(grads(model), dense_mean(), 1e-2)
    return found


def _divide(module: nn.Module, factor: float) -> None:
    if isinstance(module, torch.distributed.fsdp.FSDPModule):
        module.set_gradient_divide_factor(factor)


def both() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def replicas_job(spec: str, factor: float | None) -> tuple[dict[str, Tensor], bool, Tensor]:
    """Returns gradients of the first step, whether they are the dense mean, and later weights."""
    mesh = both()
    model = sharded(mesh["shard"])
    shards = gradwire.attach_fsdp(model, spec, replicas=mesh["replicate"])
    if factor is not None:
        model.apply(lambda m: _divide(m, factor))
    loss_of(model, 0).backward()
    first = grads(model)
    scale = 1.0 if factor is None else dist.get_world_size() / factor
    same = close(first, dense_mean(scale=scale))
    for parameter in model.parameters():
        parameter.grad = None
    train(model, 3, first=1)
    assert shards.stats()["steps"] == 4
    shards.detach()
    return first, same, weights(model)


MICRO_BATCHES = 4


def accumulate(model: Any, steps: int, setters: tuple[str, ...]) -> None:
    """Adds up gradients of micro-batches; the setters are True at the last one of each step."""
    for i in range(steps * MICRO_BATCHES):
        for setter in setters:
            getattr(model, setter)((i + 1) % MICRO_BATCHES == 0)
        (loss_of(model, i) / MICRO_BATCHES).backward()


def unsent_mean(shards: gradwire.Shards, name: str, mesh: DeviceMesh) -> Tensor:
    """Returns the mean over replicas of what waits to be sent of a parameter's shard."""
    lane = shards._engine.lanes[name]
    unsent = lane.memory.unsent(lane.memory_state)
    mean = torch.zeros(lane.ctx.numel) if unsent is None else unsent.detach().clone()
    dist.all_reduce(mean, group=mesh.get_group())
    return mean / mesh.size()


def accumulated_replicas_job(spec: str, setters: tuple[str, ...]) -> tuple[int, int, float]:
    """Returns exchanges, collectives, and the largest error against FSDP2's own replicas.

    What waits in residuals counts as sent.
    """
    mesh = both()
    native, model = sharded(mesh), sharded(mesh["shard"])
    shards = gradwire.attach_fsdp(model, spec, replicas=mesh["replicate"], nan_policy="ignore")
    # FSDP2 drops its partial sums at the end of a pass unless it knows that others follow.
    accumulate(native, 2, ("set_requires_all_reduce", "set_is_last_backward"))
    accumulate(model, 2, setters)
    error = 0.0
    own, pairs = dict(model.named_parameters()), native.named_parameters()
    for name, expected in pairs:
        theirs: Any = expected.grad
        ours: Any = own[name].grad
        unsent = unsent_mean(shards, name, mesh["replicate"])
        found = ours.to_local().reshape(-1) + unsent[: ours.to_local().numel()]
        difference = found - theirs.to_local().reshape(-1)
        error = max(error, float(difference.abs().max()) if difference.numel() else 0.0)
    stats: Any = shards.stats()
    shards.detach()
    return stats["steps"], shards._comm.meter.calls, error


def partial_sums_job() -> tuple[str, bool, str, bool]:
    """Detaches, and steps in backward, while partial sums of micro-batches wait."""
    mesh = both()
    model: Any = sharded(mesh["shard"])
    shards = gradwire.attach_fsdp(model, "none", replicas=mesh["replicate"])
    model.set_requires_all_reduce(False)
    loss_of(model, 0).backward()
    text, attached = failure_of(shards.detach), shards._is_attached()
    model.set_requires_all_reduce(True)
    loss_of(model, 1).backward()
    same = close(grads(model), dense_mean(2))
    shards.detach()
    stepping: Any = sharded(mesh["shard"])
    shards = gradwire.attach_fsdp(stepping, "none", replicas=mesh["replicate"])
    stepping[4].bias.register_post_accumulate_grad_hook(lambda _: None)
    stepping.set_requires_all_reduce(False)
    hooked = failure_of(loss_of(stepping, 0).backward)
    return text, attached, hooked, same


def resume_job(spec: str) -> tuple[bool, bool]:
    """Returns whether residuals of shards survive a checkpoint, and a switch."""
    model = sharded()
    shards = gradwire.attach_fsdp(model, spec)
    train(model, 2)
    file = io.BytesIO()
    torch.save(shards.state_dict(), file)
    file.seek(0)
    fresh = sharded()
    with torch.no_grad():
        for mine, other in zip(fresh.parameters(), model.parameters(), strict=True):
            mine.copy_(other)
    again = gradwire.attach_fsdp(fresh, spec)
    again.load_state_dict(torch.load(file, weights_only=True))
    train(model, 2, first=2)
    train(fresh, 2, first=2)
    norm = again.stats()["residual_norm"]
    again.switch("efsign")
    kept = again.stats()["residual_norm"] == norm
    return torch.equal(weights(model), weights(fresh)), kept


def overflow_job() -> tuple[list[bool], str, bool]:
    """Puts an infinity on one rank, which must give a NaN in every shard and leave no trace."""
    model = sharded()
    shards = gradwire.attach_fsdp(model, "topk:ratio=0.1")
    train(model, 2)
    before = shards.stats()["residual_norm"]
    loss = loss_of(model, 2) * (torch.inf if dist.get_rank() == 1 else 1.0)
    loss.backward()
    locals_: list[Any] = [p.grad for p in model.parameters()]
    seen = [bool(g.to_local().isnan().any()) for g in locals_ if g.to_local().numel()]
    same = shards.stats()["residual_norm"] == before
    raising = sharded()
    gradwire.attach_fsdp(raising, "topk:ratio=0.1", nan_policy="raise")
    loss = loss_of(raising, 2) * (torch.inf if dist.get_rank() == 1 else 1.0)
    return seen, failure_of(loss.backward), same


def refusals_job() -> dict[str, str]:
    found = {}
    mesh = both()
    found["plain"] = failure_of(lambda: gradwire.attach_fsdp(mlp(), "efsign"))
    found["none"] = failure_of(lambda: gradwire.attach_fsdp(None, "efsign"))  # type: ignore[arg-type]
    model = sharded()
    found["seed"] = failure_of(lambda: gradwire.attach_fsdp(model, "efsign", seed="a"))  # type: ignore[arg-type]
    shards = gradwire.attach_fsdp(model, "efsign")
    found["twice"] = failure_of(lambda: gradwire.attach_fsdp(model, "efsign"))
    shards.detach()
    found["votes"] = failure_of(lambda: gradwire.attach_fsdp(model, "signsgd"))
    found["exchange"] = failure_of(lambda: gradwire.attach_fsdp(model, "efsign", exchange="gather"))
    found["memory"] = failure_of(lambda: gradwire.attach_fsdp(model, "efsign", memory="ef21"))
    found["reducer"] = failure_of(lambda: gradwire.Reducer(model, "efsign"))
    native = sharded(mesh)
    found["native"] = failure_of(
        lambda: gradwire.attach_fsdp(native, "efsign", replicas=mesh["replicate"])
    )
    two = sharded(mesh["shard"])
    found["overlap"] = failure_of(
        lambda: gradwire.attach_fsdp(two, "efsign", replicas=mesh["shard"])
    )
    hooked = sharded(mesh["shard"])
    hooked[0].set_all_reduce_hook(print)  # type: ignore[operator]
    found["slot"] = failure_of(
        lambda: gradwire.attach_fsdp(hooked, "efsign", replicas=mesh["replicate"])
    )
    unused = sharded()
    gradwire.attach_fsdp(unused, "efsign")
    unused[4].bias.requires_grad_(False)
    found["unused"] = failure_of(lambda: loss_of(unused, 0).backward())
    return found
