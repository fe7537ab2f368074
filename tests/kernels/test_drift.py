"""Drift kernels: hand-computed examples, and equal results in both CPU backends."""

from types import ModuleType
from unittest.mock import patch

import pytest
import torch

from drift_checks import check_drift
from gradwire.kernels import cpu, reference
from gradwire.kernels.cpu import drift
from gradwire.kernels.specs import DriftTensors
from odd import same_bits

each_backend = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])

UNSET = [torch.nan, torch.nan]


def make_drifts(*rows: list[float]) -> DriftTensors:
    return DriftTensors(*([torch.tensor(row)] for row in rows))


@each_backend
@pytest.mark.parametrize(("lookahead", "params"), [(1.0, [3.0, -2.0]), (0.25, [1.5, -0.5])])
def test_capture_drift(backend: ModuleType, lookahead: float, params: list[float]) -> None:
    drifts = make_drifts([3.0, -2.0], [1.0, 0.0], [7.0, 7.0], UNSET)
    backend.capture_drift(drifts, lookahead)
    assert drifts.drift[0].tolist() == [-2.0, 2.0]
    assert drifts.params[0].tolist() == drifts.base[0].tolist() == params
    assert drifts.anchor[0].tolist() == [7.0, 7.0]


@each_backend
def test_apply_outer_mean(backend: ModuleType) -> None:
    """Local steps since the capture are preserved on top of the new anchor."""
    drifts = make_drifts([3.5, 1.0], [2.5, 1.0], [1.0, 1.0], [-1.0, 4.0])
    backend.apply_outer_mean(drifts, 0.5)
    assert drifts.anchor[0].tolist() == [1.5, -1.0]
    assert drifts.params[0].tolist() == [2.5, -1.0]
    assert drifts.base[0].tolist() == [1.5, -1.0]
    assert drifts.drift[0].tolist() == [-1.0, 4.0]


@each_backend
def test_rounding_to_the_dtype_of_parameters_is_no_drift(backend: ModuleType) -> None:
    drifts = make_drifts([1.0], [1.0], [1.0], [-0.001])
    drifts.params[0] = drifts.params[0].bfloat16()
    backend.apply_outer_mean(drifts, 1.0)
    assert drifts.params[0].item() == drifts.base[0].item() == 1.0
    assert drifts.anchor[0].item() == pytest.approx(1.001)
    backend.capture_drift(drifts, 1.0)
    assert drifts.drift[0].item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rate", "lookahead"), [(1.0, 0.5), (0.7, 1.0), (1.0, 0.3)])
def test_equal_to_the_reference_in_chunks(
    dtype: torch.dtype, rate: float, lookahead: float
) -> None:
    with patch.object(drift, "CHUNK", 64):
        assert check_drift(cpu, rate, lookahead, dtype) == 3


@each_backend
def test_apply_and_capture_does_both(backend: ModuleType) -> None:
    rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(3)).tolist()
    fused, separate = make_drifts(*rows), make_drifts(*rows)
    backend.apply_and_capture(fused, 1.0, 0.5)
    backend.apply_outer_mean(separate, 1.0)
    backend.capture_drift(separate, 0.5)
    for [one], [other] in zip(fused, separate, strict=True):
        assert same_bits(one, other)


@each_backend
def test_a_parameter_without_entries(backend: ModuleType) -> None:
    backend.apply_and_capture(make_drifts([], [], [], []), 1.0, 0.5)
