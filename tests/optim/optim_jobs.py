"""Jobs of the tests of compressed optimisers. Each runs on every rank and returns plain values."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.base import UpdateRule
from gradwire.errors import ConfigError
from gradwire.optim import Adam, AdamW, Lion, Muon
from gradwire.optim.base import CompressedOptimizer

KINDS: dict[str, type[Any]] = {"AdamW": AdamW, "Adam": Adam, "Lion": Lion, "Muon": Muon}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 10)
    )


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 64, generator=generator)
    return x, torch.randint(10, (16,), generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = data(step, dist.get_rank())
    return nn.functional.cross_entropy(model(x), y)


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def ddp_model(**options: Any) -> DDP:
    return DDP(mlp(), bucket_cap_mb=0.01, **options)


def steps(model: DDP, optimizer: CompressedOptimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        loss_of(model, step).backward()
        optimizer.step()


def trained(kind: str, spec: str, ddp: dict[str, Any], options: dict[str, Any]) -> Tensor:
    model = ddp_model(**ddp)
    optimizer = KINDS[kind](model, compress=spec, **options)
    steps(model, optimizer, 0, 4)
    optimizer.link.detach()
    return weights_of(model)


def beside_dense(kind: str, clip: float, ddp: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns parameters without compression, and of DDP with a dense optimiser.

    For Adam that is torch's; for the others their rule on DDP's mean gradient.
    """
    lr, decay = 0.01, 0.0 if kind == "Adam" else 0.1
    model, plain = ddp_model(**ddp), ddp_model(**ddp)
    optimizer = KINDS[kind](model, lr, weight_decay=decay, clip=clip)
    steps(model, optimizer, 0, 5)
    assert optimizer.link.stats()["steps"] == 5
    rules: dict[str, UpdateRule] = {f"module.{n}": r for n, r in optimizer._dense_rules.items()}
    optimizer.link.detach()
    theirs = None
    if kind in ("Adam", "AdamW"):
        build = getattr(torch.optim, kind)
        theirs = build(plain.parameters(), lr, weight_decay=decay, fused=True)
    own = {n: rules[n].state(p.numel(), p.device) for n, p in plain.named_parameters()}
    for step in range(5):
        plain.zero_grad()
        loss_of(plain, step).backward()
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        if theirs is not None:
            theirs.step()
            continue
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                update = rules[name].update(parameter.grad.clone(), own[name], own[name])
                parameter.sub_(lr * (update.view_as(parameter) + decay * parameter))
    return weights_of(model), weights_of(plain)


def residual_with_rates(rates: list[float], decay: float) -> dict[str, Tensor]:
    """Returns the residuals after steps whose gradients do not depend on the parameters."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(64, 40, bias=False))
    optimizer = AdamW(model, 0.1, weight_decay=decay, compress="topk:ratio=0.05")
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        x, _ = data(step, dist.get_rank())
        model(x).sum().backward()
        optimizer.step()
    lane = optimizer.link._engine.lanes["weight"]
    state = {key: value.clone() for key, value in lane.memory_state.items()}
    optimizer.link.detach()
    return state


def grouped() -> tuple[bool, bool]:
    """Returns whether a group with a zero rate stays, and the other moves."""
    model = ddp_model()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "betas": (0.8, 0.9)}, {"params": biases, "lr": 0.0}]
    before = [p.detach().clone() for p in (*weights, *biases)]
    optimizer = AdamW(model, 0.1, params=groups, compress="int4", weight_decay=0.1)
    steps(model, optimizer, 0, 2)
    optimizer.link.detach()
    same = [torch.equal(p, q) for p, q in zip((*weights, *biases), before, strict=True)]
    return not any(same[: len(weights)]), all(same[len(weights) :])


def resumed(kind: str, spec: str, folder: str | None) -> bool:
    """Returns whether a run that is saved and resumed, by DCP if a folder is given, is the same."""
    model = ddp_model()
    optimizer = KINDS[kind](model, compress=spec)
    steps(model, optimizer, 0, 3)
    weights = {n: p.clone() for n, p in model.module.state_dict().items()}
    saved = optimizer.state_dict()
    if folder is not None:
        dcp.save({"model": weights, "optimizer": saved}, checkpoint_id=folder)
    steps(model, optimizer, 3, 3)
    optimizer.link.detach()

    fresh = ddp_model()
    optimizer = KINDS[kind](fresh, compress=spec)
    if folder is not None:
        state = {"model": fresh.module.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        weights, saved = state["model"], state["optimizer"]
    fresh.module.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    steps(fresh, optimizer, 3, 3)
    optimizer.link.detach()
    return torch.equal(weights_of(model), weights_of(fresh))


def with_nonfinite_step(spec: str) -> tuple[Tensor, Tensor, bool]:
    """Returns parameters with a spoilt step and without it, and whether it was undone."""
    results, undone = [], False
    for spoilt in (True, False):
        model = ddp_model()
        optimizer = AdamW(model, 0.01, compress=spec)
        steps(model, optimizer, 0, 2)
        if spoilt:
            before = weights_of(model)
            loss = loss_of(model, 7)
            (loss * torch.inf if dist.get_rank() == 1 else loss).backward()
            optimizer.step()
            undone = torch.equal(before, weights_of(model))
        steps(model, optimizer, 2, 3)
        optimizer.link.detach()
        results.append(weights_of(model))
    return results[0], results[1], undone


def accumulated() -> tuple[Tensor, str]:
    """Returns parameters after two micro-batches a step, and the error of a forgotten no_sync."""
    model = ddp_model()
    optimizer = AdamW(model, compress="int4")
    for step in range(0, 6, 2):
        with model.no_sync():
            loss_of(model, step).backward()
        loss_of(model, step + 1).backward()
        optimizer.step()
    weights = weights_of(model)
    for step in range(2):
        loss_of(model, step).backward()
    error = _error(optimizer.step)
    optimizer.link.detach()
    return weights, error


def switched_to_dense() -> tuple[bool, bool, bool, bool, Tensor]:
    """Returns whether moments are kept by a switch from dense and averaged by one to dense.

    Then whether a checkpoint after the last switch continues bitwise, also across the switches, and
    the parameters at the end.
    """
    model = ddp_model()
    optimizer = AdamW(model)

    def moments() -> Tensor:
        lanes = optimizer.link._engine.lanes.values()
        states = [lane.memory_state for lane in lanes]
        return torch.cat([s[key].view(-1) for s in states for key in ("exp_avg", "exp_avg_sq")])

    def mean() -> Tensor:
        total = moments()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    steps(model, optimizer, 0, 2)
    before = moments()
    optimizer.link.switch("topk:ratio=0.05")
    kept = torch.equal(before, moments())
    steps(model, optimizer, 2, 2)
    expected, differed = mean(), not torch.equal(mean(), moments())
    optimizer.link.switch("none")
    averaged = torch.allclose(expected, moments())
    steps(model, optimizer, 4, 2)
    weights = {n: p.clone() for n, p in model.module.state_dict().items()}
    saved = optimizer.state_dict()
    steps(model, optimizer, 6, 2)
    optimizer.link.detach()
    fresh = ddp_model()
    optimizer = AdamW(fresh)
    fresh.module.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    steps(fresh, optimizer, 6, 2)
    optimizer.link.detach()
    same = torch.equal(weights_of(model), weights_of(fresh))
    return kept, averaged and differed, same, bool(expected.any()), weights_of(model)


def switched() -> tuple[bool, Tensor]:
    """Returns whether a switch keeps the moments, and the parameters at the end."""
    model = ddp_model()
    optimizer = AdamW(model, compress="topk:ratio=0.05")
    steps(model, optimizer, 0, 3)

    def moments() -> list[Tensor]:
        lanes = optimizer.link._engine.lanes.values()
        return [lane.memory_state[key].clone() for lane in lanes for key in ("exp_avg", "step")]

    before = moments()
    optimizer.link.switch("powersgd:rank=2")
    kept = all(map(torch.equal, before, moments()))
    steps(model, optimizer, 3, 2)
    optimizer.link.detach()
    return kept, weights_of(model)


def _error(call: Any) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "no error"


def refusals() -> dict[str, str]:
    """Returns the error texts of wrong uses."""
    found = {"not ddp": _error(lambda: AdamW(mlp()))}  # type: ignore[arg-type]
    attached = ddp_model()
    link = gradwire.attach(attached, "int4")
    found["attached"] = _error(lambda: AdamW(attached))
    link.detach()
    hooked = ddp_model()
    hooked.register_comm_hook(None, fp16_compress_hook)
    found["hook"] = _error(lambda: AdamW(hooked))
    model = ddp_model()
    optimizer = AdamW(model)
    found["twice"] = _error(lambda: Lion(model))
    found["attach"] = _error(lambda: gradwire.attach(model, "int4"))
    found["wrap"] = _error(lambda: gradwire.wrap_optimizer(optimizer, "int4"))
    found["added group"] = _error(lambda: optimizer.add_param_group({"params": []}))
    found["foreign state"] = _error(
        lambda: optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    )
    found["no link.switch"] = _error(lambda: optimizer.link.switch("topk:ratio=0.1", memory="ef21"))
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    found["betas"] = _error(optimizer.step)
    optimizer.link.detach()
    found["detached"] = _error(optimizer.step)
    for memory in ("ef21", "momentum"):
        settings = gradwire.Settings("topk:ratio=0.1", memory=memory)
        found[memory] = _error(partial(AdamW, model, compress=settings))
    found["controller"] = _error(
        lambda: AdamW(model, compress="topk:ratio=0.1", controller="autopilot")
    )
    found["missing"] = _error(lambda: AdamW(model, params=[next(model.parameters())]))
    found["rate"] = _error(lambda: AdamW(model, -1.0))
    found["adam decay"] = _error(lambda: Adam(model, weight_decay=0.1))
    found["spec"] = _error(lambda: AdamW(model, compress="top_k"))
    dtypes = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).to(torch.bfloat16))
    found["dtypes"] = _error(lambda: AdamW(DDP(dtypes)))
    devices = ddp_model()
    devices.module[0].to("meta")
    found["devices"] = _error(lambda: AdamW(devices))
    sparse = DDP(nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4)))
    found["sparse"] = _error(lambda: AdamW(sparse))
    return found
