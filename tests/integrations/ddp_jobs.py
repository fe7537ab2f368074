"""Jobs of the DDP tests. Each runs on every rank and returns plain values."""

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

import gradwire
from gradwire.comm.pipeline import _RunningProgram


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 10)]
    return nn.Sequential(*layers).to(dtype)


def data(step: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 64, generator=generator).to(dtype)
    return x, torch.randint(10, (16,), generator=generator)


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x, y = data(step, dist.get_rank(), dtype)
    return nn.functional.cross_entropy(model(x).float(), y)


def train(
    model: DDP, steps: int, first: int = 0, dtype: torch.dtype = torch.float32
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, dtype)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def trained(spec: str, steps: int, ddp: dict[str, Any], options: dict[str, Any]) -> Tensor:
    model = DDP(mlp(), **ddp)
    link = gradwire.attach(model, spec, **options)
    train(model, steps)
    link.detach()
    return weights(model)


def trained_half(spec: str, dtype: torch.dtype) -> tuple[Tensor, bool]:
    model = DDP(mlp(dtype), bucket_cap_mb=0.01)
    link = gradwire.attach(model, spec)
    train(model, 3, dtype=dtype)
    same_type = all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
    link.detach()
    return weights(model), same_type


def plain(steps: int) -> Tensor:
    model = DDP(mlp(), bucket_cap_mb=0.01)
    train(model, steps)
    return weights(model)


def seen_by_simulation(spec: str, options: dict[str, Any]) -> tuple[list[dict[str, Tensor]], Any]:
    """Returns the local gradients and their means by DDP, to compare with a simulation."""
    local = mlp()
    loss_of(local, 0).backward()
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, spec, **options)
    loss_of(model, 0).backward()
    stats = link.stats()
    link.detach()
    return [grads(local), grads(model.module)], stats["message_bytes"]


def no_sync_job(spec: str) -> tuple[bool, bool]:
    """Compares two micro-batches under no_sync with one exchange of their sum."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, spec)
    with model.no_sync():
        loss_of(model, 0).backward()
    untouched = link.stats()["steps"] == 0
    loss_of(model, 1).backward()
    accumulated = grads(model)
    link.detach()

    whole = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(whole, spec)
    (loss_of(whole, 0) + loss_of(whole, 1)).backward()
    link.detach()
    close = all(
        torch.allclose(accumulated[n], g, rtol=1e-3, atol=1e-6) for n, g in grads(whole).items()
    )
    return untouched, close


class Partly(nn.Module):
    """A model with a branch that only even ranks use, and one that is unused."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.common = nn.Linear(64, 64)
        self.sometimes = nn.Linear(64, 64)
        self.never = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.common(x)
        return self.sometimes(x) if dist.get_rank() % 2 == 0 else x


def unused_job(spec: str) -> tuple[bool, Tensor]:
    model = DDP(Partly(), find_unused_parameters=True, bucket_cap_mb=0.01)
    link = gradwire.attach(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(data(step, dist.get_rank())[0]).square().mean().backward()
        optimizer.step()
    none = model.module.never.weight.grad is None
    link.detach()
    return none, weights(model)


def subgroup_job(spec: str, exchange: str = "auto") -> Tensor:
    """Trains two independent models, on ranks 0,1 and on ranks 2,3."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[dist.get_rank() // 2]
    model = DDP(mlp(), process_group=group, bucket_cap_mb=0.01)
    link = gradwire.attach(model, spec, exchange=exchange)
    train(model, 3)
    link.detach()
    return weights(model)


def switch_job(first: str, second: str) -> tuple[Tensor, float, float, str]:
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, first)
    train(model, 3)
    before = link.stats()["residual_norm"]
    link.switch(second)
    after = link.stats()["residual_norm"]
    train(model, 3, first=3)
    name = link.stats()["spec"]
    link.detach()
    return weights(model), before, after, name


def switch_exchange_job() -> tuple[Tensor, list[int]]:
    """Trains flat, in nodes of two, of four, and flat again; returns inside_bytes after each."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, "efsign")
    inside = []
    ways = ["gather", "hierarchical:node=2", "hierarchical:node=4", "gather"]
    for number, way in enumerate(ways):
        link.switch("efsign", exchange=way)
        train(model, 2, first=2 * number)
        inside.append(link.stats()["inside_bytes"])
    link.detach()
    return weights(model), inside


def groups_job() -> list[int]:
    """Returns the number of process groups after each of three runs with nodes."""
    model = DDP(mlp())
    found = []
    for _ in range(3):
        gradwire.attach(model, "efsign", exchange="hierarchical:node=2").detach()
        found.append(len(dist.distributed_c10d._world.pg_map))
    return found


def rate_job() -> tuple[Tensor, float, float, str]:
    """Returns residuals before and after a tenfold smaller rate, and a bad rate's error."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, "topk:ratio=0.01", exchange="sharded")
    train(model, 3)
    before = link.stats()["residual_norm"]
    link.learning_rate_changed(0.1, 0.01)
    after = link.stats()["residual_norm"]
    train(model, 3, first=3)
    try:
        link.learning_rate_changed(0.1, 0.0)
        message = ""
    except gradwire.ConfigError as error:
        message = str(error)
    link.detach()
    return weights(model), before, after, message


def detach_job() -> tuple[Tensor, Tensor, str]:
    """Checks that a detached model trains as plain DDP does, and can be attached again."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, "topk:ratio=0.1")
    link.detach()
    train(model, 3)
    detached = weights(model)
    try:
        link.switch("none")
        message = ""
    except gradwire.ConfigError as error:
        message = str(error)
    again = gradwire.attach(model, "topk:ratio=0.1")
    train(model, 2, first=3)
    again.detach()
    return detached, weights(model), message


def resume_job(spec: str, least_bytes: int = 0, chunk_bytes: int = 0) -> bool:
    """Compares six steps with three, a checkpoint, and three more in a new DDP: the same bits."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, spec, least_bytes=least_bytes, chunk_bytes=chunk_bytes)
    train(model, 3)
    file = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "link": link.state_dict()}, file)
    train(model, 3, first=3)
    link.detach()

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(fresh, spec, least_bytes=least_bytes, chunk_bytes=chunk_bytes)
    fresh.module.load_state_dict(saved["model"])
    link.load_state_dict(saved["link"])
    train(fresh, 3, first=3)
    link.detach()
    return torch.equal(weights(model), weights(fresh))


def many_buckets_job(spec: str, steps: int) -> Tensor:
    """Trains with a bucket per layer, where torch's PowerSGD hook aborts on gloo."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for _ in range(6):
        blocks += [nn.Linear(48, 48), nn.ReLU()]
    model = DDP(nn.Sequential(nn.Linear(64, 48), *blocks, nn.Linear(48, 10)), bucket_cap_mb=0.001)
    link = gradwire.attach(model, spec, least_bytes=0)
    train(model, steps)
    assert link.stats()["calls"] >= 2 * 6 * (steps - 1)
    link.detach()
    return weights(model)


def other_collectives_job() -> Tensor:
    """Runs a user's collectives on the default group, from hooks in the middle of backward."""
    model = mlp()

    def meanwhile(_: Tensor) -> None:
        dist.all_reduce(torch.ones(1000))

    for parameter in model.parameters():
        parameter.register_hook(meanwhile)
    ddp = DDP(model, bucket_cap_mb=0.01)
    link = gradwire.attach(ddp, "powersgd:rank=2")
    train(ddp, 20)
    link.detach()
    return weights(ddp)


def failure_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def disagreement_job(key: str) -> str:
    """Attaches with other settings on rank 2."""
    odd = dist.get_rank() == 2
    model = DDP(mlp())
    if key == "spec":
        return failure_of(lambda: gradwire.attach(model, "topk:ratio=0.1" if odd else "efsign"))
    if key == "seed":
        return failure_of(lambda: gradwire.attach(model, "efsign", seed=5 if odd else 0))
    return failure_of(lambda: gradwire.attach(model, "efsign", checksum=odd))


def different_models_job(key: str) -> str:
    """Gives rank 2 the parameters in another order or type, or another version of the package.

    DDP would refuse to start with some of these, so a stub takes its place.
    """
    odd = dist.get_rank() == 2
    names = ["b", "a"] if odd and key == "order" else ["a", "b"]
    model = nn.ModuleDict({name: nn.Linear(40, 40) for name in names})
    if odd and key == "dtype":
        model["b"].to(torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        if odd and key == "version":
            patch.setattr("gradwire.integrations.handle.VERSION", "0.0.9")
        return failure_of(lambda: gradwire.Reducer(model, "efsign"))


def refusals_job() -> dict[str, str]:
    """Returns the errors of attach, by what was wrong."""
    found = {}
    found["not ddp"] = failure_of(lambda: gradwire.attach(mlp(), "efsign"))  # type: ignore[arg-type]
    found["name"] = failure_of(lambda: gradwire.attach(DDP(mlp()), "top_k:ratio=0.1"))
    found["memory"] = failure_of(
        lambda: gradwire.attach(DDP(mlp()), "qsgd:bits=2", memory="residual")
    )
    found["exchange"] = failure_of(lambda: gradwire.attach(DDP(mlp()), "efsign", exchange="mean"))
    sparse = DDP(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)))
    found["sparse"] = failure_of(lambda: gradwire.attach(sparse, "efsign"))
    taken = DDP(mlp())
    taken.register_comm_hook(None, _some_hook)
    found["slot"] = failure_of(lambda: gradwire.attach(taken, "efsign"))
    twice = DDP(mlp())
    link = gradwire.attach(twice, "efsign")
    found["twice"] = failure_of(lambda: gradwire.attach(twice, "efsign"))
    link.detach()
    mixed = DDP(mlp(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    found["mixed"] = failure_of(lambda: gradwire.attach(mixed, "efsign"))
    double = DDP(mlp(torch.float64))
    found["dtype"] = failure_of(lambda: gradwire.attach(double, "efsign"))
    compiled: Any = torch.compile(DDP(mlp()), backend="eager")
    found["compiled"] = failure_of(lambda: gradwire.attach(compiled, "efsign"))
    found["reducer"] = failure_of(lambda: gradwire.Reducer(compiled, "efsign"))
    wrapped: Any = nn.ModuleDict({"inner": DDP(mlp())})
    found["wrapped"] = failure_of(lambda: gradwire.attach(wrapped, "efsign"))
    frozen = DDP(mlp(), find_unused_parameters=True)
    frozen.module[0].bias.requires_grad_(False)
    found["frozen"] = failure_of(lambda: gradwire.attach(frozen, "efsign"))
    # An argument of DDP in torch 2.12.
    skipping = DDP(mlp())
    skipping.skip_all_reduce_unused_params = True
    found["skipping"] = failure_of(lambda: gradwire.attach(skipping, "efsign"))
    return found


def wrong_types_job() -> dict[str, str]:
    """Returns attach's errors on arguments of wrong types, and whether it works afterwards."""
    model, others = DDP(mlp()), dist.new_group([1, 2, 3])
    bad: dict[str, dict[str, Any]] = {
        "class": {"compressor": gradwire.TopK},
        "memory": {"memory": 3},
        "exchange": {"exchange": None},
        "seed": {"seed": "a"},
        "scaler": {"scaler": 1024.0},
        "group": {"process_group": "world"},
    }
    if dist.get_rank() == 0:
        bad["not a member"] = {"process_group": others}
    found = {}
    for key, wrong in bad.items():
        settings = {"compressor": "randomk:ratio=0.1", **wrong}
        found[key] = failure_of(lambda settings=settings: gradwire.attach(model, **settings))  # type: ignore[misc]
    link = gradwire.attach(model, "randomk:ratio=0.1")
    train(model, 1)
    link.detach()
    return found


def _some_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def failure_surfaces_job() -> tuple[str, str]:
    """Raises an exception in the communication thread, which backward must raise unchanged."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, "topk:ratio=0.1")
    train(model, 2)

    def broken(*_: object) -> None:
        raise gradwire.WireError("bad bytes")

    link._runner._add = broken  # type: ignore[attr-defined]
    before = grads(model)
    for parameter in model.parameters():
        parameter.grad = None
    local = mlp()
    local.load_state_dict(model.module.state_dict())
    loss_of(local, 5).backward()
    text = failure_of(lambda: loss_of(model, 5).backward())
    untouched = all(torch.equal(g, grads(model.module)[n]) for n, g in grads(local).items())
    return text, f"untouched: {untouched}, had gradients: {bool(before)}"


def uneven_job(spec: str, least_bytes: int = 0) -> Tensor:
    """Gives rank 0 more batches than the others, under DDP's join."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, spec, least_bytes=least_bytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(5 if dist.get_rank() == 0 else 3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    link.detach()
    return weights(model)


def compiled_job(spec: str) -> Tensor:
    # The compiler needs a first bucket that is no larger than the others.
    model = DDP(mlp())
    link = gradwire.attach(model, spec)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(compiled, step).backward()
        optimizer.step()
    assert link.stats()["steps"] == 3
    link.detach()
    return weights(model)


def rebuilt_job() -> tuple[int, Tensor]:
    """Checks that state is kept by parameter, so DDP may rebuild its buckets after a step."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, "topk:ratio=0.1")
    train(model, 4)
    own: Any = link.state_dict()[f"rank{dist.get_rank()}"]
    steps = {lane["step"] for lane in own["lanes"].values()}
    assert steps == {4}
    link.detach()
    return 4, weights(model)


def several_models_job(how: str) -> tuple[Tensor, Tensor]:
    """Trains two models of one process on two groups, alternately or in one backward pass."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    first = DDP(mlp(), bucket_cap_mb=0.01)
    second = DDP(mlp(), process_group=pairs[dist.get_rank() // 2], bucket_cap_mb=0.02)
    links = [gradwire.attach(first, "topk:ratio=0.1"), gradwire.attach(second, "powersgd:rank=2")]
    models = (first, second)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [loss_of(model, step) for model in models]
        if how == "together":
            sum(losses, torch.zeros(())).backward()
        else:
            # The order changes from step to step, but is the same on all ranks.
            for loss in losses if step % 2 else reversed(losses):
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    for link in links:
        assert link.stats()["steps"] == 6
        link.detach()
    return weights(first), weights(second)


@contextmanager
def interrupted(link: gradwire.Link, interrupt: Callable[[], None]) -> Iterator[list[int]]:
    """Calls `interrupt` once when several buckets are on the wire; yields how many there were."""
    pipeline = link._runner._pipeline  # type: ignore[attr-defined]
    under_way: list[int] = []
    original = _RunningProgram.receive

    def receive(running: _RunningProgram) -> None:
        count = sum(one._pending is not None for one in pipeline._running)
        if count > 1 and running._pending is not None and not under_way:
            under_way.append(count)
            interrupt()
        original(running)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_RunningProgram, "receive", receive)
        yield under_way


def failure_in_flight_job() -> tuple[list[str], int, str]:
    """Returns the errors of two passes, the buckets on the wire at the first, and threads left."""
    before = set(threading.enumerate())
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, "powersgd:rank=1", least_bytes=0)
    train(model, 2)

    def lost() -> None:
        raise gradwire.PeerError("rank 3 is gone")

    with interrupted(link, lost) as under_way:
        errors = [failure_of(lambda: loss_of(model, 5).backward()) for _ in range(2)]
    left = [thread.name for thread in set(threading.enumerate()) - before]
    link.detach()
    return errors, under_way[0], str(left)


def switch_in_flight_job() -> tuple[str, int, Tensor]:
    """Returns the error of a switch while buckets are under way, their number, and parameters."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, "powersgd:rank=1", least_bytes=0)
    train(model, 2)
    errors: list[str] = []
    switch = partial(failure_of, lambda: link.switch("int4"))
    with interrupted(link, lambda: errors.append(switch())) as under_way:
        train(model, 1, first=2)
    train(model, 1, first=3)
    link.detach()
    return errors[0], under_way[0], weights(model)


def failed_runner_job() -> tuple[list[str], str]:
    """Returns the errors of two backward passes after a failure, and the threads left."""
    before = set(threading.enumerate())
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = gradwire.attach(model, "topk:ratio=0.1")
    train(model, 2)

    def broken(*_: object) -> None:
        raise gradwire.PeerError("rank 3 is gone")

    link._runner._add = broken  # type: ignore[attr-defined]
    errors = [failure_of(lambda: loss_of(model, 5).backward()) for _ in range(2)]
    left = [thread.name for thread in set(threading.enumerate()) - before]
    link.detach()
    return errors, str(left)
