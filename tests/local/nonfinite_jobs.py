"""Jobs of workers of which one gets a non-finite gradient, and which all recover."""

import torch
import torch.distributed as dist
from local_workers import plain_sgd, small_model, weights
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
