"""Runs on four ranks in which small buckets are merged."""

import torch
from ddp_jobs import mlp, train, weights
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire

STEPS = 6


def deep() -> nn.Module:
    torch.manual_seed(0)
    blocks = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Linear(64, 10))


def calls_job(spec: str, least_bytes: int | None) -> tuple[Tensor, int]:
    """Returns the weights, and how many collectives a step took."""
    # The first step has other buckets, before DDP has seen the order of gradients.
    model = DDP(deep(), bucket_cap_mb=0.001)
    link = gradwire.attach(model, spec, least_bytes=least_bytes)
    train(model, 1)
    before = int(str(link.stats()["calls"]))
    train(model, STEPS, first=1)
    calls = int(str(link.stats()["calls"])) - before
    link.detach()
    return weights(model), calls // STEPS


def refused_job() -> str:
    model = DDP(mlp())
    try:
        gradwire.attach(model, "efsign", least_bytes=-1)
    except gradwire.ConfigError as error:
        return str(error)
    return ""
