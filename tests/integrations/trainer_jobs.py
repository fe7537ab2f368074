"""Shared by the jobs of all trainer tests."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gradwire

SPEC = "topk:ratio=0.1"


class ResumeResult(NamedTuple):
    """The end of a run on this rank, and of one that was resumed half-way."""

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
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(64, 64, generator=generator), torch.randint(10, (64,), generator=generator)
    )


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def flat_state(link: gradwire.Link | gradwire.Shards | None) -> dict[str, Tensor]:
    """Returns all tensors and numbers of a link's state by path; the rank is part of the path."""
    assert link is not None
    state = link.state_dict()
    assert [*state] == [f"rank{dist.get_rank()}"]
    return dict(_flat("", state))


def record_rates(link: gradwire.Link | None) -> list[float | None]:
    """Returns a list that gets the learning rate of every `epoch_ended` of the link."""
    assert link is not None
    results: list[float | None] = []
    link.epoch_ended = results.append  # type: ignore[method-assign, assignment]
    return results


def _flat(place: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        return [pair for key, v in value.items() for pair in _flat(f"{place}/{key}", v)]
    if isinstance(value, Tensor):
        return [(place, value.clone())]
    return [(place, torch.tensor(value))] if isinstance(value, int | float) else []
