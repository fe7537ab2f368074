"""Jobs that the ranks of the controller tests run; each returns plain values."""

import io
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 10)]
    return nn.Sequential(*layers)


def model() -> DDP:
    return DDP(network(), bucket_cap_mb=0.01)


def train(net: DDP, first: int, steps: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(16, 64, generator=generator)
        y = torch.randint(10, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def controlled_run(spec: str, controller: str, steps: int) -> tuple[Tensor, Any]:
    """Returns the weights and the controller's stats after a save, a load and a switch."""
    net = model()
    link = gradwire.attach(net, spec, controller=controller)
    train(net, 0, steps)
    link.epoch_ended(0.1)
    train(net, steps, 2)
    file = io.BytesIO()
    torch.save(link.state_dict(), file)
    file.seek(0)
    link.detach()
    link = gradwire.attach(net, spec, controller=controller)
    link.load_state_dict(torch.load(file, weights_only=True))
    train(net, steps + 2, 2)
    explained = link.stats()["controller"]
    link.switch(spec.replace("topk", "redsync"))
    train(net, steps + 4, 2)
    link.detach()
    return weights(net), explained


def different(rank_low: float) -> str:
    """Returns the error of attach if rank 1 has another controller."""
    low = rank_low if dist.get_rank() == 1 else 10
    try:
        gradwire.attach(model(), "topk:ratio=0.1", controller=f"gravac:low={low}")
    except gradwire.ConfigError as error:
        return str(error)
    return "no error"


def accumulated(batches: int) -> tuple[Tensor, list[int]]:
    """Accumulates as many batches as the controller asks for; returns the number in each step."""
    net = model()
    controller = "accordion:setting=batch,low=1,high=4,interval=1,epoch_steps=8,eta=1"
    link = gradwire.attach(net, "none", controller=controller)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    taken: list[int] = []
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    y = torch.arange(16) % 10
    while sum(taken) < batches:
        explained: Any = link.stats()["controller"]
        passes = explained["accumulate"]
        for number in range(passes):
            with net.no_sync() if number < passes - 1 else nullcontext():
                (nn.functional.cross_entropy(net(x), y) / passes).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(passes)
    assert link.stats()["steps"] == len(taken)
    link.detach()
    return weights(net), taken


def skipped(controller: str) -> tuple[bool, bool, bool]:
    """Lets a loss scaler skip an optimiser step, since one rank overflows.

    Returns whether weights stay equal, statistics stay equal, and weights move again after it.
    """
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    link = gradwire.attach(net, "topk:ratio=0.1", controller=controller, scaler=scaler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(number: int, factor: float) -> tuple[Tensor, Any]:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        optimizer.zero_grad()
        loss = net(torch.randn(16, 64, generator=generator)).square().mean()
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        explained: Any = link.stats()["controller"]
        return weights(net).clone(), explained

    for number in range(4):
        before, explained = step(number, 1.0)
    skipped_weights, after = step(4, float("inf") if dist.get_rank() == 1 else 1.0)
    skipped_steps: Any = link.stats()["skipped"]
    moved, _ = step(5, 1.0)
    link.detach()
    same = skipped_steps == 1 and torch.equal(before, skipped_weights) and scaler.get_scale() == 2.0
    return same, explained == after, not torch.equal(skipped_weights, moved)
