"""Jobs of the tests of DeMo and 1-bit Adam. Each runs on every rank and returns plain values."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from optim_jobs import data, ddp_model, loss_of, steps, weights_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.errors import ConfigError
from gradwire.optim import DeMo, Dion, OneBitAdam
from gradwire.optim.base import CompressedOptimizer

BUILD: dict[str, Callable[[Any], CompressedOptimizer]] = {
    "DeMo": lambda model: DeMo(model, 1e-3, weight_decay=0.1, k=4, side=8),
    "Dion": lambda model: Dion(model, rank=4),
    "OneBitAdam": lambda model: OneBitAdam(model, warmup=3),
}


def trained(kind: str) -> tuple[Tensor, list[str], str]:
    """Returns parameters, the lanes with momentum, and the error of a switch."""
    model = ddp_model()
    optimizer = BUILD[kind](model)
    steps(model, optimizer, 0, 3)
    lanes = optimizer.link._engine.lanes
    kept = [name for name, lane in lanes.items() if "residual" in lane.memory_state]
    [error] = _errors([partial(optimizer.link.switch, "none")])
    optimizer.link.detach()
    return weights_of(model), kept, error


def dion_refusals() -> list[str]:
    model = ddp_model()
    return _errors(
        [
            partial(Dion, model, exchange="mean"),
            partial(Dion, model, rank=500),
            partial(Dion, model, rank=0),
            partial(Dion, model, momentum=1.0),
            partial(Dion, model, matrices=lambda name, _: name == "0.bias"),
        ]
    )


def bytes_of_demo(count: int) -> int:
    """Returns the bytes that this rank sent in some steps of one matrix of 96 by 64."""
    model = DDP(nn.Linear(64, 96, bias=False))
    optimizer = DeMo(model, k=4, side=8, nan_policy="ignore")
    for step in range(count):
        loss = model(data(step, dist.get_rank())[0]).square().mean()
        loss.backward()
        optimizer.step()
    sent = optimizer.link.stats()["sent_bytes"]
    optimizer.link.detach()
    return int(str(sent))


def trained_by_onebit() -> list[Any]:
    """Returns parameters after the warm-up, those of AdamW, the state, and the parameters later."""
    model, plain = ddp_model(), ddp_model()
    optimizer = BUILD["OneBitAdam"](model)
    adamw = torch.optim.AdamW(plain.parameters(), weight_decay=0.0, fused=True)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        plain.zero_grad()
        loss_of(plain, step).backward()
        adamw.step()
    warm = weights_of(model), weights_of(plain)
    lanes = optimizer.link._engine.lanes
    before = {n: lane.memory_state["exp_avg_sq"].clone() for n, lane in lanes.items()}
    steps(model, optimizer, 3, 4)
    lanes = optimizer.link._engine.lanes
    after = {n: lane.memory_state["exp_avg_sq"] for n, lane in lanes.items()}
    frozen = all(torch.equal(before[name], after[name]) for name in before)
    momenta = torch.cat([lane.memory_state["exp_avg"] for lane in lanes.values()])
    spec = optimizer.link.stats()["spec"]
    optimizer.link.detach()
    return [*warm, frozen, momenta, weights_of(model), spec]


def resumed(kind: str, first: int) -> bool:
    """Returns whether a run that is saved after some steps and resumed is the same."""
    model = ddp_model()
    optimizer = BUILD[kind](model)
    steps(model, optimizer, 0, first)
    weights = {n: p.clone() for n, p in model.module.state_dict().items()}
    saved = optimizer.state_dict()
    steps(model, optimizer, first, 4)
    optimizer.link.detach()
    fresh = ddp_model()
    optimizer = BUILD[kind](fresh)
    fresh.module.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    steps(fresh, optimizer, first, 4)
    optimizer.link.detach()
    return torch.equal(weights_of(model), weights_of(fresh))


def _errors(calls: list[Callable[[], object]]) -> list[str]:
    found = []
    for call in calls:
        try:
            call()
            found.append("no error")
        except ConfigError as error:
            found.append(str(error))
    return found


def demo_refusals() -> list[str]:
    model = ddp_model()
    return _errors(
        [
            partial(DeMo, model, memory="residual"),
            partial(DeMo, model, exchange="gather"),
            partial(DeMo, model, k=65, side=8),
            partial(DeMo, model, decay=1.5),
        ]
    )


def onebit_refusals() -> list[str]:
    model = ddp_model()
    return _errors(
        [
            partial(OneBitAdam, model, warmup=0),
            partial(OneBitAdam, model, warmup=1, memory="none"),
            partial(OneBitAdam, model, warmup=1, compress="qsgd:bits=2"),
            partial(OneBitAdam, model, warmup=1, betas=(0.9, 1.0)),
            partial(OneBitAdam, model, warmup=1, compress="none"),
        ]
    )
