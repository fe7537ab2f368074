"""Jobs that the ranks of the tests of the automatic mode run; each returns plain values."""

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.auto.rows import Row
from gradwire.auto.runtime import AutoRuntime


def model() -> DDP:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 10))
    return DDP(net, bucket_cap_mb=0.1)


def train(net: DDP, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(16, 64, generator=generator)
        y = torch.randint(10, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def automatic_run(spec: str, adaptive: bool, chunk_bytes: int | None) -> tuple[Tensor, Any, Any]:
    """Returns the weights, and what was chosen before a save and after a load."""
    net = model()
    kind = torch.optim.AdamW if adaptive else torch.optim.SGD
    optimizer = kind(net.parameters(), lr=1e-3)
    link = gradwire.attach(net, spec, optimizer=optimizer, chunk_bytes=chunk_bytes)
    train(net, optimizer, 0, 50)
    before = link.stats()["controller"]
    file = io.BytesIO()
    torch.save(link.state_dict(), file)
    file.seek(0)
    link.detach()
    link = gradwire.attach(net, spec, optimizer=optimizer, chunk_bytes=chunk_bytes)
    link.load_state_dict(torch.load(file, weights_only=True))
    after = link.stats()["controller"]
    train(net, optimizer, 50, 3)
    link.detach()
    return weights(net), before, after


def embedding_model() -> DDP:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64)]
    return DDP(nn.Sequential(nn.Embedding(4096, 32), *layers), bucket_cap_mb=0.1)


def embedding_steps(net: DDP, first: int, steps: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randint(4096, (16,), generator=generator)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def mixed_run() -> tuple[Tensor, Tensor, str, str]:
    """Returns the weights of a straight and of a resumed run with a mixed plan, and both plans."""
    net = embedding_model()
    link = gradwire.attach(net, "auto")
    embedding_steps(net, 0, 12)
    runtime = link._engine.observer
    assert isinstance(runtime, AutoRuntime)
    search = runtime.search
    option = search.table.plans.mixed(("powersgd:rank=2", "int4"), search.table.link)
    # As `mix` would on a slow link: what is measured here is another machine's business.
    del search.table.options[search.table.singles :], search.table.rows[search.table.singles :]
    search.table.options.append(option)
    search.table.rows.append(Row(level="low"))
    search.phase, search.current = "settled", search.table.singles
    embedding_steps(net, 12, 5)
    before = str(link.stats()["spec"])
    saved = {"link": link.state_dict(), "net": copy.deepcopy(net.module.state_dict())}
    embedding_steps(net, 17, 3)
    straight = weights(net)
    link.detach()
    net.module.load_state_dict(saved["net"])
    link = gradwire.attach(net, "auto")
    link.load_state_dict(saved["link"])
    after = str(link.stats()["spec"])
    embedding_steps(net, 17, 3)
    link.detach()
    return straight, weights(net), before, after


def refusals() -> list[str]:
    """Returns the errors of what the automatic mode refuses."""
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    single = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    found = []
    for spec, options in (
        ("auto", {"controller": "autopilot"}),
        ("auto", {"memory": "residual"}),
        ("auto", {"exchange": "gather"}),
        ("auto:risk=high", {}),
        ("auto:speed=1", {}),
        ("auto", {"optimizer": "adam"}),
        ("topk:ratio=0.1", {"optimizer": sgd}),
        ("auto", {"process_group": single}),
    ):
        try:
            gradwire.attach(net, spec, **options)  # type: ignore[arg-type]
        except gradwire.ConfigError as error:
            found.append(str(error))
    # The model can still be attached to.
    link = gradwire.attach(net, "auto", optimizer=sgd)
    try:
        link.switch("topk:ratio=0.1")
    except gradwire.ConfigError as error:
        found.append(str(error))
    link.detach()
    return found


def different() -> str:
    """Returns the error of attach if rank 1 has another budget."""
    try:
        gradwire.attach(model(), "auto:risk=low" if dist.get_rank() == 1 else "auto")
    except gradwire.ConfigError as error:
        return str(error)
    return "no error"
