"""Runs on four ranks in which buckets wait for each other."""

import io

import torch
import torch.distributed as dist
from ddp_jobs import loss_of, mlp, train, weights
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic

STEPS = 6


def deep() -> nn.Module:
    torch.manual_seed(0)
    blocks = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Linear(64, 10))


def calls_job(spec: str, least_bytes: int) -> tuple[Tensor, int]:
    """What comes of it, and how many calls a step took."""
    # The first step has buckets of its own, before DDP has seen in which order gradients come.
    model = DDP(deep(), bucket_cap_mb=0.001)
    link = laconic.attach(model, spec, least_bytes=least_bytes)
    train(model, 1)
    before = int(str(link.stats()["calls"]))
    train(model, STEPS, first=1)
    calls = int(str(link.stats()["calls"])) - before
    link.detach()
    return weights(model), calls // STEPS


def resumed_job(spec: str) -> bool:
    """The same bits where a run goes on after a checkpoint."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = laconic.attach(model, spec, least_bytes=1000)
    train(model, 3)
    file = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "link": link.state_dict()}, file)
    train(model, 3, first=3)
    link.detach()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = DDP(mlp(), bucket_cap_mb=0.01)
    link = laconic.attach(fresh, spec, least_bytes=1000)
    fresh.module.load_state_dict(saved["model"])
    link.load_state_dict(saved["link"])
    train(fresh, 3, first=3)
    link.detach()
    return torch.equal(weights(model), weights(fresh))


def joined_job(spec: str) -> Tensor:
    """Rank 0 has more batches than the others, under DDP's join."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    link = laconic.attach(model, spec, least_bytes=1_000_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(5 if dist.get_rank() == 0 else 3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    link.detach()
    return weights(model)


def refused_job() -> str:
    model = DDP(mlp())
    try:
        laconic.attach(model, "efsign", least_bytes=-1)
    except laconic.ConfigError as error:
        return str(error)
    return ""
