"""Drifts from a base: what the functions mean, alike in both backends on the CPU."""

from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from drift_checks import check_drift
from laconic.kernels import cpu, reference
from laconic.kernels.cpu import drift
from odd import same_bits

each_backend = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])

Vector = list[Tensor]


def vectors(*rows: list[float]) -> list[Vector]:
    return [[torch.tensor(row)] for row in rows]


@each_backend
@pytest.mark.parametrize(("ahead", "there"), [(1.0, [3.0, -2.0]), (0.25, [1.5, -0.5])])
def test_departing(backend: ModuleType, ahead: float, there: list[float]) -> None:
    here, base, gone = vectors([3.0, -2.0], [1.0, 0.0], [torch.nan, torch.nan])
    backend.depart(here, base, gone, ahead)
    assert gone[0].tolist() == [-2.0, 2.0]
    assert here[0].tolist() == base[0].tolist() == there


@each_backend
def test_arriving(backend: ModuleType) -> None:
    """What a step since departure has added stays, on top of where the mean leads."""
    here, base, anchor, mean = vectors([3.5, 1.0], [2.5, 1.0], [1.0, 1.0], [-1.0, 4.0])
    backend.arrive(here, base, anchor, mean, 0.5)
    assert anchor[0].tolist() == [1.5, -1.0]
    assert here[0].tolist() == [2.5, -1.0]
    assert base[0].tolist() == [1.5, -1.0]
    assert mean[0].tolist() == [-1.0, 4.0]


@each_backend
def test_what_a_type_rounds_off_is_not_told(backend: ModuleType) -> None:
    here = [torch.tensor([1.0], dtype=torch.bfloat16)]
    base, anchor, mean = vectors([1.0], [1.0], [-0.001])
    backend.arrive(here, base, anchor, mean, 1.0)
    assert here[0].item() == base[0].item() == 1.0
    assert anchor[0].item() == pytest.approx(1.001)
    backend.depart(here, base, mean, 1.0)
    assert mean[0].item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rate", "ahead"), [(1.0, 0.5), (0.7, 1.0), (1.0, 0.3)])
def test_alike_by_stretches(dtype: torch.dtype, rate: float, ahead: float) -> None:
    with patch.object(drift, "STRETCH", 64):
        assert check_drift(cpu, rate, ahead, dtype) == 3


@each_backend
def test_on_the_way_is_arriving_and_departing(backend: ModuleType) -> None:
    together, apart = (vectors(*torch.randn(4, 9, generator=dice()).tolist()) for _ in range(2))
    here, base, anchor, gone = apart
    backend.relay(*together, 1.0, 0.5)
    backend.arrive(here, base, anchor, gone, 1.0)
    backend.depart(here, base, gone, 0.5)
    for [one], [other] in zip(together, apart, strict=True):
        assert same_bits(one, other)


def dice() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@each_backend
def test_a_parameter_without_entries(backend: ModuleType) -> None:
    backend.relay(*([torch.zeros(0)] for _ in range(4)), 1.0, 0.5)
