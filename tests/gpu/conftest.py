"""Shared by the tests on a card."""

from collections.abc import Callable
from functools import wraps

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills what kernels take without clearing it with NaN or the largest integer.

    Torch's own switch for that refuses many operations on a card.
    """
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _filled(getattr(owner, name)))


def _filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def filled(*args: object, **kwargs: object) -> Tensor:
        room = make(*args, **kwargs)
        if room.dtype == torch.bool or room.is_complex():
            return room
        return room.fill_(torch.nan if room.is_floating_point() else torch.iinfo(room.dtype).max)

    return filled
