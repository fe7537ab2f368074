"""Fixtures of the GPU tests."""

from collections.abc import Callable
from functools import wraps

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills memory that kernels allocate without clearing with NaN or the largest integer.

    Torch's own switch for that refuses many operations on a GPU.
    """
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _filled(getattr(owner, name)))


def _filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def filled(*args: object, **kwargs: object) -> Tensor:
        tensor = make(*args, **kwargs)
        if tensor.dtype == torch.bool or tensor.is_complex():
            return tensor
        return tensor.fill_(
            torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
        )

    return filled
