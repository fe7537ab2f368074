"""How parameters drift, arrive and depart in a backend, held against what it means in torch."""

from types import ModuleType

import torch

from gradwire.kernels import reference
from gradwire.kernels.specs import Drifted
from odd import normal, odd_numbers, same_numbers

SIZES = 1, 33, 2100


def made(dtype: torch.dtype, device: str = "cpu") -> Drifted:
    """Parameters in several sizes, one of them of odd numbers."""
    here = [normal(size, size) for size in SIZES]
    here.append(torch.cat([some for kind, some in odd_numbers(300).items() if kind != "normal"]))
    rest = [[normal(one.numel(), seed) for one in here] for seed in range(3)]
    lists = [[one.to(dtype) for one in here], *rest]
    return Drifted(*([one.to(device) for one in some] for some in lists))


def check_drift(
    backend: ModuleType, rate: float, ahead: float, dtype: torch.dtype, device: str = "cpu"
) -> int:
    """How many functions did the same."""
    calls = {"depart": (ahead,), "arrive": (rate,), "relay": (rate, ahead)}
    for name, shares in calls.items():
        mine, theirs = made(dtype, device), made(dtype, device)
        getattr(backend, name)(mine, *shares)
        getattr(reference, name)(theirs, *shares)
        for one, other in zip(mine, theirs, strict=True):
            for vector, expected in zip(one, other, strict=True):
                assert vector.dtype == expected.dtype
                assert same_numbers(vector, expected), (name, vector.numel())
    return len(calls)
