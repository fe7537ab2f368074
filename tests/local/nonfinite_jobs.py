"""Jobs of workers of which one gets a non-finite gradient, and which all recover."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from local_jobs import DENSE_MEANS, METHODS
from local_workers import momentum_sgd, plain_sgd, small_model, take_step, weights
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gradwire.errors import NonFiniteError
from gradwire.local import CSER, DiLoCo, QsparseLocalSGD
from gradwire.local.base import LocalMethod
from gradwire.local.outer_loop import OuterLoopMethod

STEPS = 24


def make_method(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> LocalMethod:
    if name == "cser-pl":
        return CSER(model, optimizer, None, "topk:ratio=0.3", sync_every=2)
    kind, every, delay, fragments = name.split("-")
    if kind == "qsparse":
        return QsparseLocalSGD(
            model, optimizer, "topk:ratio=0.1", sync_every=int(every), delay=int(delay)
        )
    settings = {"sync_every": int(every), "delay": int(delay), "fragments": int(fragments)}
    return DiLoCo(model, optimizer, **settings)  # type: ignore[arg-type]


def recovered(name: str) -> tuple[list[int], Tensor, Tensor]:
    """Returns the steps that raised, the final common tensors, and this worker's weights."""
    model, rank = small_model(), dist.get_rank()
    optimizer, raised = plain_sgd(model), []
    good = [p.detach().clone() for p in model.parameters()]
    with make_method(name, model, optimizer) as local:
        for step in range(1, STEPS + 1):
            generator = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            mse_loss(model(torch.randn(8, 40, generator=generator)), torch.zeros(8, 32)).backward()
            if (step, rank) == (7, 1):
                grad = model[2].weight.grad
                assert grad is not None
                grad[0, 0] = float("nan")
            try:
                optimizer.step()
            except NonFiniteError:
                raised.append(step)
                with torch.no_grad():
                    for parameter, copy in zip(model.parameters(), good, strict=True):
                        parameter.copy_(copy)
        common = local._common() if isinstance(local, OuterLoopMethod) else {"x": torch.zeros(1)}
        return raised, torch.cat([t.flatten() for t in common.values()]).clone(), weights(model)


PHASES = 14
"""Steps of the runs below: a sync fails in them, and the next ones succeed."""

Save = dict[str, Any]


class Outcome(NamedTuple):
    """The results of a run: the steps that raised, all weights of this worker, its final state."""

    raised: list[int]
    weights: list[Tensor]
    state: dict[str, Any]


def saving_changes_nothing(name: str) -> str:
    """Returns the first difference between runs with and without a state saved at each step."""
    plain, saving = train_phases(name), train_phases(name, lambda local, *_: local.state_dict())
    return _difference(plain, saving)


def resumed_differences(name: str) -> dict[int, str]:
    """Returns the steps after which a run that resumes differs from one that goes on."""
    saves: dict[int, Save] = {}

    def save(local: LocalMethod, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        own = {n: t.clone() for n, t in model.state_dict().items()}
        inner = deepcopy(optimizer.state_dict())
        saves[local.steps] = {"local": local.state_dict(), "model": own, "optimizer": inner}

    whole = train_phases(name, save)
    found = {}
    for step, saved in saves.items():
        raised, passed, state = train_phases(name, resume=saved)
        before = [s for s in whole.raised if s <= step]
        again = Outcome(before + raised, whole.weights[:step] + passed, state)
        if text := _difference(whole, again):
            found[step] = text
    return found


def train_phases(
    name: str,
    after_step: Callable[[LocalMethod, nn.Module, torch.optim.Optimizer], object] | None = None,
    resume: Save | None = None,
) -> Outcome:
    """Trains `PHASES` steps; a parameter of rank 1 is not finite after step 3 until a sync fails.

    With a dense mean it always is finite, since nothing would detect it.
    """
    method, args, settings = METHODS[name]
    model, rank = small_model(), dist.get_rank()
    optimizer, raised, seen = momentum_sgd(model), [], []
    good = [p.detach().clone() for p in model.parameters()]
    local = method(model, optimizer, *args, **settings)
    if resume is not None:
        model.load_state_dict(resume["model"])
        optimizer.load_state_dict(resume["optimizer"])
        local.load_state_dict(resume["local"])
    with local:
        for step in range(local.steps + 1, PHASES + 1):
            if (step, rank) == (3, 1) and name not in DENSE_MEANS:
                model[2].weight.data[0, 0] = torch.nan
            try:
                take_step(model, optimizer, step, rank)
            except NonFiniteError:
                raised.append(step)
                optimizer.state.clear()
                with torch.no_grad():
                    for parameter, copy in zip(model.parameters(), good, strict=True):
                        parameter.copy_(copy)
            seen.append(weights(model))
            if after_step is not None:
                after_step(local, model, optimizer)
        return Outcome(raised, seen, local.state_dict())


def _difference(one: Outcome, other: Outcome) -> str:
    if one.raised != other.raised:
        return f"raised at {one.raised} and {other.raised}"
    for step, (a, b) in enumerate(zip(one.weights, other.weights, strict=True), 1):
        # NaN equals itself here.
        if not torch.equal(a.view(torch.int32), b.view(torch.int32)):
            return f"weights after step {step}"
    return _state_difference(one.state, other.state, "state")


def _state_difference(one: Any, other: Any, path: str) -> str:
    """Returns the path of the first entry in which two states differ."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{path}: {[*one]} and {[*other]}"
        pairs = [(key, one[key], other[key]) for key in one]
    elif isinstance(one, list):
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, Tensor):
        same = torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
        return "" if same else path
    else:
        return "" if one == other else path
    found = (_state_difference(a, b, f"{path}.{key}") for key, a, b in pairs)
    return next((text for text in found if text), "")
