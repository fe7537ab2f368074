"""Workers of which one meets a gradient that is not finite, and who all go on."""

import torch
import torch.distributed as dist
from local_workers import plain_sgd, small_model, weights
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gradwire.errors import NonFiniteError
from gradwire.local import CSER, DiLoCo, QsparseLocalSGD
from gradwire.local.base import LocalSteps
from gradwire.local.outer_loop import AnchoredSteps

STEPS = 24


def made(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> LocalSteps:
    if name == "cser-pl":
        return CSER(model, optimizer, None, "topk:ratio=0.3", sync_every=2)
    kind, every, delay, fragments = name.split("-")
    if kind == "qsparse":
        return QsparseLocalSGD(
            model, optimizer, "topk:ratio=0.1", sync_every=int(every), delay=int(delay)
        )
    rounds_like = {"sync_every": int(every), "delay": int(delay), "fragments": int(fragments)}
    return DiLoCo(model, optimizer, **rounds_like)  # type: ignore[arg-type]


def recovered(name: str) -> tuple[list[int], Tensor, Tensor]:
    """Steps that raised, what all workers agree on at the end, and this one's weights."""
    model, rank = small_model(), dist.get_rank()
    optimizer, raised = plain_sgd(model), []
    good = [p.detach().clone() for p in model.parameters()]
    with made(name, model, optimizer) as local:
        for step in range(1, STEPS + 1):
            dice = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            mse_loss(model(torch.randn(8, 40, generator=dice)), torch.zeros(8, 32)).backward()
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
        agreed = local._common() if isinstance(local, AnchoredSteps) else {"x": torch.zeros(1)}
        return raised, torch.cat([t.flatten() for t in agreed.values()]).clone(), weights(model)
