"""Jobs of the tests of `gradwire.doctor`. Each runs on every rank and returns plain values."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.perfmodel.link_table import LinkTable, measure_links
from gradwire.perfmodel.step_watch import MeasurementDone, StepWatch, Watched


def loss(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    result: torch.Tensor = model(torch.randn(8, 64, generator=generator)).square().mean()
    return result


def diagnosed() -> tuple[str, list[str], bool, bool]:
    """Returns the text, the methods that were tried, and whether the model stayed as it was."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(64, 64))
    before = model.module.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = gradwire.doctor(model, loss, optimizer, seconds=0.5)
    untouched = torch.equal(before, model.module.weight) and not model._comm_hooks
    return str(found), [gain.trial.spec for gain in found.gains], untouched, not optimizer.state


def watched(kind: str) -> Watched:
    """Watches a loop that does not know of it, as a script does."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(64, 64)
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DDP(model)
    if kind == "hooked":
        gradwire.attach(model, "powersgd:rank=2")
    watch = StepWatch(0.5, methods=("none", "powersgd:rank=2"))
    watch.install()
    optimizer = torch.optim.Adam(model.parameters())
    try:
        while True:
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    except MeasurementDone:
        watch.close()
    assert watch.result is not None
    return watch.result


def links() -> LinkTable:
    group = dist.group.WORLD
    assert group is not None
    return measure_links(group, torch.device("cpu"))
