"""Functions that run on every rank in test_comm_hook.py."""

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire

POLICIES = "0.*: int4; default: powersgd:rank=2"


def model() -> DDP:
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 80)), bucket_cap_mb=0.01)


def train(ddp: DDP, steps: int) -> Tensor:
    """Returns the parameters after some steps, each rank on its own data."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])


def registered(method: Any) -> tuple[Tensor, Tensor, dict[str, object]]:
    """Trains with torch's own registration and with `attach`; then detaches the first."""
    ddp, attached = model(), model()
    state, hook = gradwire.comm_hook(method, ddp)
    ddp.register_comm_hook(state, hook)
    link = gradwire.attach(attached, method)
    ours, expected = train(ddp, 3), train(attached, 3)
    assert state.link is not None
    handle = state.link
    assert isinstance(handle, gradwire.Link)
    stats = {key: handle.stats()[key] for key in ("spec", "steps", "sent_bytes")}
    assert stats == {key: link.stats()[key] for key in stats}
    # A copy is plain DDP, and so is the model itself after detach.
    copied = copy.deepcopy(ddp)
    torch.save(ddp, io.BytesIO())
    handle.detach()
    again = gradwire.attach(ddp, "none")
    train(ddp, 1)
    again.detach()
    link.detach()
    train(copied, 1)
    return ours, expected, stats


def refusals() -> list[str]:
    """Returns the texts of what `comm_hook` cannot do."""
    found: list[str] = []
    ddp = model()
    state, hook = gradwire.comm_hook("int4", ddp)

    def attempt(action: Any) -> None:
        try:
            action()
        except gradwire.ConfigError as error:
            found.append(str(error))
        else:
            found.append("no error")

    attempt(lambda: gradwire.comm_hook("int4"))
    attempt(lambda: gradwire.comm_hook("int4", nn.Linear(4, 4)))  # type: ignore[arg-type]
    attempt(lambda: train(ddp, 1))
    attempt(lambda: gradwire.comm_hook("int4", ddp))
    ddp.register_comm_hook(state, hook)
    other = model()
    other.register_comm_hook(state, hook)
    attempt(lambda: train(other, 1))
    assert isinstance(state.link, gradwire.Link)
    state.link.detach()
    attempt(lambda: gradwire.comm_hook("int4", ddp))
    taken = model()
    taken.register_comm_hook(None, torch_hook())
    attempt(lambda: gradwire.comm_hook("int4", taken))
    return found


def torch_hook() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook
