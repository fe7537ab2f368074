"""Compares the drift kernels of a backend with the reference."""

from types import ModuleType

import torch

from gradwire.kernels import reference
from gradwire.kernels.specs import DriftTensors
from odd import normal, odd_numbers, same_numbers

SIZES = 1, 33, 2100


def make_drifts(dtype: torch.dtype, device: str = "cpu") -> DriftTensors:
    """Returns parameters of several sizes, one of them with special numbers."""
    params = [normal(size, size) for size in SIZES]
    params.append(torch.cat([x for kind, x in odd_numbers(300).items() if kind != "normal"]))
    rest = [[normal(vector.numel(), seed) for vector in params] for seed in range(3)]
    lists = [[vector.to(dtype) for vector in params], *rest]
    return DriftTensors(*([vector.to(device) for vector in vectors] for vectors in lists))


def check_drift(
    backend: ModuleType, rate: float, lookahead: float, dtype: torch.dtype, device: str = "cpu"
) -> int:
    """Asserts equality; returns the number of kernels compared."""
    calls = {
        "capture_drift": (lookahead,),
        "apply_outer_mean": (rate,),
        "apply_and_capture": (rate, lookahead),
    }
    for name, args in calls.items():
        ours, expected = make_drifts(dtype, device), make_drifts(dtype, device)
        getattr(backend, name)(ours, *args)
        getattr(reference, name)(expected, *args)
        for some, others in zip(ours, expected, strict=True):
            for vector, other in zip(some, others, strict=True):
                assert vector.dtype == other.dtype
                assert same_numbers(vector, other), (name, vector.numel())
    return len(calls)
