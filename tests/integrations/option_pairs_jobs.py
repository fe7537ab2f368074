"""Jobs of the tests of options in pairs. Each runs on every rank."""

import hashlib
from typing import Any, NamedTuple

import ddp_jobs as jobs
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.errors import ConfigError

STEPS = 3


class Run(NamedTuple):
    """The result of a short training run on one rank."""

    refused: str | None
    """The text of the ConfigError that `attach` raised."""
    weights: str = ""
    """A hash of the final weights."""
    steps: int = 0
    finite: bool = True


def runs_job(settings: list[dict[str, Any]]) -> list[Run]:
    """Trains a model for a few steps with each of these settings."""
    return [_run(dict(one)) for one in settings]


def _run(options: dict[str, Any]) -> Run:
    model = DDP(jobs.mlp(), bucket_cap_mb=0.01)
    scaler = None
    if options.pop("scaler", False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    try:
        link = gradwire.attach(model, options.pop("compressor"), scaler=scaler, **options)
    except ConfigError as error:
        return Run(str(error))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = jobs.loss_of(model, step)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    steps = int(str(link.stats()["steps"]))
    link.detach()
    weights = jobs.weights(model)
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    return Run(None, digest, steps, bool(weights.isfinite().all()))
