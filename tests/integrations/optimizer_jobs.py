"""Jobs of the optimiser-side tests. Each runs on every rank."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_jobs import Partly, data, failure_of, grads, loss_of, mlp, weights
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.integrations.reducer import Reducer, messages


def stepped(
    model: nn.Module, reducer: gradwire.Reducer, steps: int, first: int = 0, scale: float = 1.0
) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        (loss_of(model, step) * scale).backward()
        reducer.reduce()
        optimizer.step()
    return weights(model)


def trained(spec: str, steps: int, options: dict[str, Any]) -> Tensor:
    model = mlp()
    return stepped(model, gradwire.Reducer(model, spec, **options), steps)


def against_link_job(spec: str) -> tuple[bool, bool]:
    """Returns whether equal gradients give equal means and bytes under DDP and in a loop."""
    model = mlp()
    reducer = gradwire.Reducer(model, spec)
    loss_of(model, 0).backward()
    reducer.reduce()
    ddp = DDP(mlp())
    link = gradwire.attach(ddp, spec)
    loss_of(ddp, 0).backward()
    message_bytes: list[Any] = [handle.stats()["message_bytes"] for handle in (reducer, link)]
    # One byte per parameter flags missing gradients.
    extra_bytes = len(grads(model))
    link.detach()
    same = all(torch.equal(g, grads(ddp.module)[n]) for n, g in grads(model).items())
    return same, message_bytes[0] == message_bytes[1] + extra_bytes


def one_liner_job() -> tuple[Tensor, int, str, bool]:
    """Trains a compiled model with one line in the loop; the reducer ends with the model."""
    found, steps, text, reducer = _one_liner()
    torch._dynamo.reset()
    gc.collect()
    return found, steps, text, reducer() is None


def _one_liner() -> tuple[Tensor, int, str, Callable[[], object]]:
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(compiled, step).backward()
        reducer = gradwire.reduce_gradients(compiled, "topk:ratio=0.1")
        optimizer.step()
    steps: Any = reducer.stats()["steps"]
    own: Any = reducer.state_dict()[f"rank{dist.get_rank()}"]
    assert own["lanes"].keys() == dict(mlp().named_parameters()).keys()
    text = failure_of(lambda: gradwire.reduce_gradients(compiled, "efsign"))
    return weights(model), steps, text, weakref.ref(reducer)


def wrapped_job(how: str) -> Tensor:
    model = mlp()
    if how == "named":
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer = gradwire.wrap_optimizer(optimizer, "topk:ratio=0.1")
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = gradwire.wrap_optimizer(optimizer, "topk:ratio=0.1", model=model)
    reducer = gradwire.handle_of(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert reducer.stats()["steps"] == 3
    reducer.detach()
    before = weights(model)
    loss_of(model, 3).backward()
    optimizer.step()
    assert reducer.stats()["steps"] == 3
    assert not torch.equal(before, weights(model))
    return before


def same_optimizer_job() -> dict[str, bool]:
    """Returns what holds of a wrapped optimiser, its copies, and after `detach`."""
    model = mlp()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = gradwire.wrap_optimizer(plain, "topk:ratio=0.1", model=model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loss_of(model, 0).backward()
    optimizer.step()
    scheduler.step()
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(optimizer),
        "pickle": pickle.loads(pickle.dumps(optimizer)),
        "file": torch.load(file, weights_only=False),
    }
    if dist.get_rank() == 0:
        # A copy that still averaged its gradients would wait for the other ranks.
        for each in copies.values():
            each.step()
    handle = gradwire.handle_of(optimizer)
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    optimizer.load_state_dict(state)
    found = {
        "same": optimizer is plain,
        "attribute": vars(optimizer)["gradwire"] is handle,
        "scheduled": optimizer.param_groups[0]["lr"] == 0.05,
        "copies": not any("gradwire" in vars(each) for each in copies.values()),
        "state": state.keys() == {"state", "param_groups"},
        "loaded": gradwire.handle_of(optimizer) is handle,
        "counted": handle.stats()["steps"] == 1,
    }
    handle.detach()
    if dist.get_rank() == 0:
        optimizer.step()
    found["detached"] = "gradwire" not in vars(optimizer)
    again = gradwire.wrap_optimizer(optimizer, "efsign", model=model)
    found["again"] = gradwire.handle_of(again) is not handle
    gradwire.handle_of(again).detach()
    return found


def later_job() -> tuple[str, str]:
    """Returns the errors where parameters are trained that were frozen at the start."""
    model = mlp()
    last = list(model.parameters())[-1].requires_grad_(False)
    reducer = gradwire.Reducer(model, "topk:ratio=0.1")
    last.requires_grad_(True)
    unfrozen = failure_of(reducer.reduce)
    reducer.detach()
    optimizer = torch.optim.SGD(list(model.parameters())[:-1], lr=0.1)
    gradwire.wrap_optimizer(optimizer, "topk:ratio=0.1", model=model)
    optimizer.add_param_group({"params": [last]})
    added = failure_of(optimizer.step)
    gradwire.handle_of(optimizer).detach()
    return unfrozen, added


def missing_job() -> tuple[bool, Tensor]:
    """Trains a model with a branch that only even ranks use, and one that is unused."""
    model = Partly()
    reducer = gradwire.Reducer(model, "efsign")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(data(step, dist.get_rank())[0]).square().mean().backward()
        reducer.reduce()
        optimizer.step()
    return model.never.weight.grad is None, weights(model)


def missing_named_job() -> str:
    model = Partly()
    reducer = gradwire.Reducer(model, "efsign", find_unused_parameters=False)
    model(data(0, dist.get_rank())[0]).square().mean().backward()
    return failure_of(reducer.reduce)


def resume_job(spec: str) -> tuple[bool, bool]:
    """Compares five steps with three, a checkpoint and two more; a switch must keep residuals."""
    model = mlp()
    reducer = gradwire.Reducer(model, spec)
    stepped(model, reducer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "reducer": reducer.state_dict()}, file)
    stepped(model, reducer, 2, first=3)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = mlp()
    again = gradwire.Reducer(fresh, spec)
    fresh.load_state_dict(saved["model"])
    again.load_state_dict(saved["reducer"])
    stepped(fresh, again, 2, first=3)
    norm = again.stats()["residual_norm"]
    again.switch("efsign")
    kept = again.stats()["residual_norm"] == norm and again.stats()["spec"] == "efsign"
    return torch.equal(weights(model), weights(fresh)), kept


def overflow_job() -> tuple[str, bool]:
    """Puts an infinity on one rank, which must raise on all and leave no trace."""
    model = mlp()
    reducer = gradwire.Reducer(model, "topk:ratio=0.1", nan_policy="raise")
    stepped(model, reducer, 2)
    before = reducer.stats()["residual_norm"]
    loss_of(model, 2).backward()
    if dist.get_rank() == 1:
        grad = model.get_parameter("2.weight").grad
        assert grad is not None
        grad[0, 0] = torch.inf
    text = failure_of(reducer.reduce)
    return text, reducer.stats()["residual_norm"] == before


def refusals_job() -> dict[str, str]:
    found = {}
    model = mlp()
    reducer = gradwire.Reducer(model, "efsign")
    found["twice"] = failure_of(lambda: gradwire.Reducer(model, "efsign"))
    link = failure_of(lambda: gradwire.attach(DDP(model), "efsign"))
    found["link"] = link
    reducer.detach()
    found["detached"] = failure_of(reducer.reduce)
    found["ddp"] = failure_of(lambda: gradwire.Reducer(DDP(mlp()), "efsign"))
    found["nameless"] = failure_of(
        lambda: gradwire.Reducer(mlp().parameters(), "efsign")  # type: ignore[arg-type]
    )
    sgd = torch.optim.SGD(mlp().parameters(), lr=0.1)
    found["optimizer"] = failure_of(lambda: gradwire.wrap_optimizer(sgd, "efsign"))
    found["strange"] = failure_of(lambda: gradwire.wrap_optimizer(sgd, "efsign", model=mlp()))
    other = mlp()
    lbfgs = torch.optim.LBFGS(other.parameters())
    gradwire.wrap_optimizer(lbfgs, "efsign", model=other)
    found["closure"] = failure_of(lambda: lbfgs.step(lambda: 0.0))
    gradwire.handle_of(lbfgs).detach()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    found["mesh"] = failure_of(lambda: gradwire.Reducer(mlp(), "efsign", process_group=mesh))
    drifted = mlp()
    with torch.no_grad():
        next(drifted.parameters()).add_(dist.get_rank() == 2)
    odd = gradwire.Reducer(drifted, "efsign")
    found["drift"] = failure_of(odd.reduce)
    return found


class _Outer(torch.optim.Optimizer):
    """An optimiser around another one that skips torch's constructor, as Accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups = inner.param_groups


def wrong_types_job() -> dict[str, str]:
    others, model = dist.new_group([1, 2, 3]), mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    gradwire.wrap_optimizer(sgd, "efsign", model=model)
    handle = gradwire.handle_of(sgd)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    bad: dict[str, Callable[[], Any]] = {
        "model": lambda: gradwire.wrap_optimizer(mlp(), "efsign"),  # type: ignore[arg-type]
        "handle": lambda: gradwire.wrap_optimizer(handle, "efsign"),  # type: ignore[type-var]
        "again": lambda: gradwire.wrap_optimizer(sgd, "efsign", model=model),
        "other": lambda: gradwire.wrap_optimizer(other, "efsign", model=model),
        "not wrapped": lambda: gradwire.handle_of(other),
        "no hooks": lambda: gradwire.wrap_optimizer(_Outer(other), "efsign", model=model),
        "none": lambda: gradwire.Reducer(None, "efsign"),  # type: ignore[arg-type]
        "names": lambda: gradwire.Reducer(["weight"], "efsign"),  # type: ignore[list-item]
        "seed": lambda: gradwire.Reducer(mlp(), "efsign", seed=1.5),  # type: ignore[arg-type]
        "group": lambda: gradwire.Reducer(mlp(), "efsign", process_group="world"),  # type: ignore[arg-type]
    }
    if dist.get_rank() == 0:
        bad["member"] = lambda: gradwire.reduce_gradients(mlp(), "efsign", process_group=others)
    found = {key: failure_of(call) for key, call in bad.items()}
    handle.detach()
    return found


def mesh_job() -> Tensor:
    """Trains a separate model on each pair of ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "together"))
    model = mlp()
    return stepped(model, gradwire.Reducer(model, "efsign", process_group=mesh["together"]), 2)


def sizes_of(lengths: list[int]) -> list[list[int]]:
    parameters = [nn.Parameter(torch.empty(n, device="meta")) for n in lengths]
    return [[p.numel() for p in message] for message in messages(parameters)]


def changing_job(early: bool) -> tuple[list[dict[str, Tensor | None]], dict[str, int], int]:
    """Returns gradients of passes in which others are present, steps, and messages sent early.

    In pass 4 a gradient is missing on all ranks for the first time, in pass 8 it is back.
    """
    model = mlp()
    names = [name for name, _ in model.named_parameters()]
    reducer = gradwire.Reducer(model, "none")
    expected_message, sent = Reducer._expected_message, 0

    def counted(self: Reducer) -> Any:
        nonlocal sent
        found = expected_message(self) if early else None
        sent += found is not None
        return found

    generator = torch.Generator().manual_seed(dist.get_rank())
    means = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reducer, "_expected_message", counted)
        for step in range(10):
            for name, parameter in model.named_parameters():
                absent = name == names[0] and (4 <= step < 8 or dist.get_rank() > 1)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                if absent:
                    parameter.grad = None
            reducer.reduce()
            found = {n: p.grad for n, p in model.named_parameters()}
            means.append({n: None if g is None else g.clone() for n, g in found.items()})
    steps = {name: reducer._engine.steps_of(name) for name in names}
    reducer.detach()
    return means, steps, sent
