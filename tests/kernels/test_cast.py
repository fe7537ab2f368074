"""Casts are equal in every backend, and value plus residual is the input."""

from types import ModuleType

import pytest
import torch

from gradwire.kernels import cpu, reference
from odd import normal, odd_numbers, same_bits, same_numbers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

each_backend = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@each_dtype
@pytest.mark.parametrize("kind", odd_numbers(0))
def test_alike_in_both_backends(kind: str, dtype: torch.dtype) -> None:
    x = odd_numbers(1001)[kind]
    assert same_numbers(cpu.cast_pack(x, dtype), reference.cast_pack(x, dtype))
    residuals = [torch.full_like(x, torch.nan) for _ in range(2)]
    ours = cpu.cast_pack_sum(x, normal(1001), 0.5, residuals[0], dtype)
    expected = reference.cast_pack_sum(x, normal(1001), 0.5, residuals[1], dtype)
    assert ours.dtype == dtype
    assert same_numbers(ours, expected)
    assert same_numbers(*residuals)


@each_backend
@each_dtype
def test_values_and_residual_sum_to_the_input(backend: ModuleType, dtype: torch.dtype) -> None:
    x, residual = normal(999), normal(999, 1)
    total = torch.add(x, residual, alpha=0.5)
    # In place of the old residual.
    values = backend.cast_pack_sum(x, residual, 0.5, residual, dtype)
    assert torch.equal(values.float() + residual, total)
    assert same_bits(values, total.to(dtype))


@each_backend
def test_half_precision_saturates(backend: ModuleType) -> None:
    x = torch.tensor([1e6, -1e6, torch.inf, torch.nan, 2.0])
    values = backend.cast_pack(x, torch.float16)
    assert values[:3].tolist() == [65504.0, -65504.0, torch.inf]
    assert values[3].isnan()
    residual_out = torch.zeros(5)
    backend.cast_pack_sum(x, torch.zeros(5), 1.0, residual_out, torch.float16)
    assert residual_out[:2].tolist() == [1e6 - 65504, 65504 - 1e6]


@each_backend
@each_dtype
def test_rows_are_added_in_order(backend: ModuleType, dtype: torch.dtype) -> None:
    rows = [normal(100, seed).to(dtype) for seed in range(10)]
    out, slow = normal(100, 11), normal(100, 11)
    backend.cast_add(out, rows, 0.125)
    for row in rows:
        slow += row.float() * 0.125
    assert same_bits(out, slow)
    backend.cast_add(out, [], 0.125)
    assert same_bits(out, slow)
