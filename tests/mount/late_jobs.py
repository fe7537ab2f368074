"""Runs on four ranks in which means come a step late."""

import reliability_jobs
import torch
import torch.distributed as dist
from ddp_jobs import failure_of, grads, loss_of, mlp, train, weights
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic

TOPK = "topk:ratio=0.1"


def _model() -> DDP:
    return DDP(mlp(), bucket_cap_mb=0.01)


def meanwhile_job() -> bool:
    """Rank 1 begins its second backward pass when rank 0's has ended."""
    model = _model()
    link = laconic.attach(model, TOPK, delay=1)
    train(model, 1)
    word = torch.zeros(1)
    loss = loss_of(model, 1)
    if dist.get_rank() == 1:
        dist.recv(word, src=0)
    loss.backward()
    if dist.get_rank() == 0:
        dist.send(word, dst=1)
    at_rest = link.stats()["steps"] == 2
    link.detach()
    return at_rest


def overflow_job(bad: float) -> tuple[list[bool], Tensor]:
    """Which passes left gradients that are finite, if one of rank 1's was not in the third."""
    model = _model()
    link = laconic.attach(model, TOPK, delay=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finite = []
    for step in range(5):
        optimizer.zero_grad()
        if step == 2:
            reliability_jobs.spoilt_backward(model, step, bad, "0.weight")
        else:
            loss_of(model, step).backward()
        finite.append(all(bool(g.isfinite().all()) for g in grads(model).values()))
        if finite[-1]:
            optimizer.step()
    assert link.stats()["skipped"] == 1
    link.detach()
    return finite, weights(model)


def raise_job() -> tuple[str, int]:
    model = _model()
    link = laconic.attach(model, TOPK, delay=1, nan_policy="raise")
    reliability_jobs.spoilt_backward(model, 0, float("nan"), "0.weight")
    text = failure_of(lambda: loss_of(model, 1).backward())
    model.zero_grad()
    train(model, 2, first=2)
    steps = int(str(link.stats()["steps"]))
    link.detach()
    return text, steps


def scaled_job(scales: list[float]) -> Tensor:
    """Gradients by a loss scale that changes before passes, unscaled by the one of the pass."""
    model = _model()
    link = laconic.attach(model, TOPK, delay=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, scale in enumerate(scales):
        link.loss_scale_changed(scale)
        optimizer.zero_grad()
        (loss_of(model, step) * scale).backward()
        for gradient in (p.grad for p in model.parameters()):
            assert gradient is not None
            gradient.div_(scale)
        optimizer.step()
    link.detach()
    return weights(model)


def between_steps_job() -> tuple[Tensor, Tensor]:
    """With and without questions and changes between steps that change nothing."""

    def trained(asked: bool) -> Tensor:
        model = _model()
        link = laconic.attach(model, TOPK, delay=1, check_every=2)
        for step in range(4):
            train(model, 1, first=step)
            if asked:
                link.stats()
                link.epoch_ended()
                link.switch(TOPK)
        link.detach()
        return weights(model)

    return trained(asked=True), trained(asked=False)


def refused_job() -> list[str]:
    late, early = _model(), _model()
    first = laconic.attach(late, TOPK, delay=1)
    second = laconic.attach(early, TOPK)
    texts = [
        failure_of(lambda: first.load_state_dict(second.state_dict())),
        failure_of(lambda: second.load_state_dict(first.state_dict())),
        failure_of(lambda: laconic.attach(_model(), TOPK, delay=2)),
        failure_of(lambda: laconic.attach(_model(), TOPK, delay=int(dist.get_rank() == 2))),
    ]
    first.detach()
    second.detach()
    return texts
