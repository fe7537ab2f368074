"""What the ranks of all tests of other people's trainers share."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gradwire

SPEC = "topk:ratio=0.1"


class Told(NamedTuple):
    """How a run ended on this rank, and how one did that was resumed half-way."""

    whole: Tensor
    resumed: Tensor
    saved: dict[str, Tensor]
    """What the first remembered at half-way."""
    restored: dict[str, Tensor]
    """What the second did when it began."""
    stats: dict[str, object]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))


def dataset() -> TensorDataset:
    dice = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(64, 64, generator=dice), torch.randint(10, (64,), generator=dice)
    )


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def remembered(link: gradwire.Link | None) -> dict[str, Tensor]:
    """All tensors and numbers of a link's state by where they are, and that it is this rank's."""
    assert link is not None
    state = link.state_dict()
    assert [*state] == [f"rank{dist.get_rank()}"]
    return dict(_flat("", state))


def rates_told(link: gradwire.Link | None) -> list[float | None]:
    """Filled with the learning rate whenever the link is told that an epoch has ended."""
    assert link is not None
    told: list[float | None] = []
    link.epoch_ended = told.append  # type: ignore[method-assign, assignment]
    return told


def _flat(place: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        return [pair for key, v in value.items() for pair in _flat(f"{place}/{key}", v)]
    if isinstance(value, Tensor):
        return [(place, value.clone())]
    return [(place, torch.tensor(value))] if isinstance(value, int | float) else []
