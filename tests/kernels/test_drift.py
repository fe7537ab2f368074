"""Drifts from a base: what the functions mean, alike in both backends on the CPU."""

from types import ModuleType
from unittest.mock import patch

import pytest
import torch

from drift_checks import check_drift
from gradwire.kernels import cpu, reference
from gradwire.kernels.cpu import drift
from gradwire.kernels.specs import Drifted
from odd import same_bits

each_backend = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])

NOTHING = [torch.nan, torch.nan]


def drifted(*rows: list[float]) -> Drifted:
    return Drifted(*([torch.tensor(row)] for row in rows))


@each_backend
@pytest.mark.parametrize(("ahead", "there"), [(1.0, [3.0, -2.0]), (0.25, [1.5, -0.5])])
def test_departing(backend: ModuleType, ahead: float, there: list[float]) -> None:
    given = drifted([3.0, -2.0], [1.0, 0.0], [7.0, 7.0], NOTHING)
    backend.depart(given, ahead)
    assert given.drift[0].tolist() == [-2.0, 2.0]
    assert given.here[0].tolist() == given.base[0].tolist() == there
    assert given.anchor[0].tolist() == [7.0, 7.0]


@each_backend
def test_arriving(backend: ModuleType) -> None:
    """What a step since departure has added stays, on top of where the mean leads."""
    given = drifted([3.5, 1.0], [2.5, 1.0], [1.0, 1.0], [-1.0, 4.0])
    backend.arrive(given, 0.5)
    assert given.anchor[0].tolist() == [1.5, -1.0]
    assert given.here[0].tolist() == [2.5, -1.0]
    assert given.base[0].tolist() == [1.5, -1.0]
    assert given.drift[0].tolist() == [-1.0, 4.0]


@each_backend
def test_what_a_type_rounds_off_is_not_told(backend: ModuleType) -> None:
    given = drifted([1.0], [1.0], [1.0], [-0.001])
    given.here[0] = given.here[0].bfloat16()
    backend.arrive(given, 1.0)
    assert given.here[0].item() == given.base[0].item() == 1.0
    assert given.anchor[0].item() == pytest.approx(1.001)
    backend.depart(given, 1.0)
    assert given.drift[0].item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rate", "ahead"), [(1.0, 0.5), (0.7, 1.0), (1.0, 0.3)])
def test_alike_by_stretches(dtype: torch.dtype, rate: float, ahead: float) -> None:
    with patch.object(drift, "STRETCH", 64):
        assert check_drift(cpu, rate, ahead, dtype) == 3


@each_backend
def test_on_the_way_is_arriving_and_departing(backend: ModuleType) -> None:
    rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(3)).tolist()
    together, apart = drifted(*rows), drifted(*rows)
    backend.relay(together, 1.0, 0.5)
    backend.arrive(apart, 1.0)
    backend.depart(apart, 0.5)
    for [one], [other] in zip(together, apart, strict=True):
        assert same_bits(one, other)


@each_backend
def test_a_parameter_without_entries(backend: ModuleType) -> None:
    backend.relay(drifted([], [], [], []), 1.0, 0.5)
