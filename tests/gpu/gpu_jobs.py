"""Jobs of the ranks of the GPU tests; several ranks may share one GPU over gloo."""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.local import LocalSGD, QsparseLocalSGD
from gradwire.local.base import LocalMethod


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 384), nn.ReLU(), nn.Linear(384, 300), nn.ReLU(), nn.Linear(300, 10)
    )


def loss_of(model: nn.Module, step: int, rank: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 256, generator=generator).to(device)
    y = torch.randint(10, (16,), generator=generator).to(device)
    return nn.functional.cross_entropy(model(x), y)


def train(model: nn.Module, steps: int, device: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, dist.get_rank(), device).backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])


def trained_on(spec: str, exchange: str, device: str, steps: int) -> Tensor:
    """Returns the weights after some steps over gloo, with gradients on the GPU or on the CPU."""
    model = DDP(mlp().to(device), bucket_cap_mb=0.1)
    link = gradwire.attach(model, spec, exchange=exchange)
    train(model, steps, device)
    link.detach()
    return weights(model)


class DelayedResult(NamedTuple):
    """The state of a rank after local steps with delayed means."""

    weights: Tensor
    anchor: Tensor
    recordings: int


def delayed_on(spec: str, device: str, sync_every: int, delay: int, steps: int) -> DelayedResult:
    """Runs local steps over gloo, with parameters on the GPU or on the CPU."""
    model = mlp().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with _delayed(spec, model, optimizer, sync_every, delay) as worker:
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step, dist.get_rank(), device).backward()
            optimizer.step()
            if device != "cpu":
                # As timers do: it must not disturb the exchange in the background.
                torch.cuda.synchronize()
        recordings = worker.stats()["cuda_graphs"]
        assert isinstance(recordings, int)
        anchor = torch.cat([tensor.cpu() for tensor in worker._common().values()])
        return DelayedResult(weights(model), anchor, recordings)


def _delayed(
    spec: str, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int, delay: int
) -> LocalMethod:
    if spec == "local":
        return LocalSGD(model, optimizer, sync_every=sync_every, delay=delay)
    return QsparseLocalSGD(model, optimizer, spec, sync_every=sync_every, delay=delay)


def one_rank_of_nccl(spec: str, exchange: str, port: int) -> tuple[Tensor, Tensor]:
    """Trains a world of one on NCCL, where any host synchronisation in the exchange is an error."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl", rank=0, world_size=1)
    results = []
    for attached in (True, False):
        model = DDP(mlp().cuda(), bucket_cap_mb=0.1)
        if attached:
            link = gradwire.attach(model, spec, exchange=exchange)
            # Allocations and autotuning happen in the first steps.
            train(model, 2, "cuda")
            loss = loss_of(model, 2, 0, "cuda")
            torch.cuda.set_sync_debug_mode("error")
            loss.backward()
            torch.cuda.set_sync_debug_mode("default")
            link.detach()
        else:
            train(model, 2, "cuda")
            loss_of(model, 2, 0, "cuda").backward()
        results.append(torch.cat([p.grad.cpu().reshape(-1) for p in model.parameters()]))
    dist.destroy_process_group()
    return results[0], results[1]
