"""Extraction, weighted addition and random blocks of entries are equal in every backend."""

from types import ModuleType

import pytest
import torch

from gradwire.kernels import cpu, reference
from gradwire.types import mix
from gradwire.wire.indices import bitmap_bits, low_bits
from odd import normal, odd_numbers, same_bits, same_numbers

CPU = torch.device("cpu")
KEY = 0x9E3779B97F4A7C15
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

each_backend = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@each_backend
@each_dtype
@pytest.mark.parametrize("kind", odd_numbers(0))
def test_extracted_values_and_residual_sum_to_the_input(
    backend: ModuleType, kind: str, dtype: torch.dtype
) -> None:
    x = odd_numbers(1000)[kind]
    index = torch.arange(0, 1000, 3)
    residual_out, expected = x.clone(), x.clone()
    values = backend.extract(residual_out, index, dtype)
    assert values.dtype == dtype
    assert same_numbers(values, reference.extract(expected, index, dtype))
    assert same_numbers(residual_out, expected)
    untouched = torch.ones(1000, dtype=torch.bool).index_fill_(0, index, False)
    assert same_bits(residual_out[untouched], x[untouched])
    finite = x[index].isfinite()
    assert torch.equal((values.float() + residual_out[index])[finite], x[index][finite])


@each_backend
def test_half_precision_saturates(backend: ModuleType) -> None:
    residual_out = torch.tensor([1e6, -1e6, torch.inf, torch.nan, 2.0])
    values = backend.extract(residual_out, torch.arange(5), torch.float16)
    assert values[:3].tolist() == [65504.0, -65504.0, torch.inf]
    assert values[3].isnan()
    assert residual_out[:2].tolist() == [1e6 - 65504, 65504 - 1e6]


@each_dtype
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(("numel", "count"), [(1, 1), (7, 7), (1000, 0), (1000, 10), (4097, 41)])
def test_rows_are_added_alike(numel: int, count: int, rows: int, dtype: torch.dtype) -> None:
    index = reference.strata(KEY, numel, count, CPU)
    values = torch.stack([normal(count, seed) for seed in range(rows)]).to(dtype)
    ours, expected, slow = (normal(numel, 9) for _ in range(3))
    cpu.add_at(ours, index, values, 1 / 3)
    reference.add_at(expected, index, values, 1 / 3)
    # In order, each product and each sum rounded.
    for row in values:
        slow.index_add_(0, index, row.float() * (1 / 3))
    assert same_bits(ours, slow)
    assert same_bits(expected, slow)


@each_backend
@each_dtype
@pytest.mark.parametrize(("numel", "count"), [(1, 1), (1000, 10), (1000, 999), (4097, 41)])
def test_packed_positions_are_added_to(
    backend: ModuleType, numel: int, count: int, dtype: torch.dtype
) -> None:
    index = reference.strata(KEY, numel, count, CPU)
    low, bits = low_bits(numel, count), bitmap_bits(numel, count)
    packed, values = reference.pack_index(index, low, bits), normal(count).to(dtype)
    out, expected = normal(numel, 1), normal(numel, 1)
    rows = torch.stack([values, -3 * values])
    backend.add_packed(out, torch.stack([packed, packed]), low, bits, rows, 0.3)
    reference.add_at(expected, index, rows, 0.3)
    assert same_bits(out, expected)


@pytest.mark.parametrize("numel", [1, 7, 1000, 4097])
@pytest.mark.parametrize("block", [1, 3, 16, 5000])
def test_blocks_are_drawn_alike(numel: int, block: int) -> None:
    for count in {1, numel // 10 or 1, numel - 1 or 1, numel}:
        for key in (0, KEY, (1 << 64) - 1, *(mix(i) for i in range(8))):
            drawn = cpu.random_blocks(key, numel, count, block, CPU)
            assert same_bits(drawn, reference.random_blocks(key, numel, count, block, CPU))
            assert (drawn.diff() > 0).all()
            assert int(drawn[0]) >= 0
            assert int(drawn[-1]) < numel


@each_backend
def test_no_blocks_no_positions(backend: ModuleType) -> None:
    assert backend.random_blocks(KEY, 0, 0, 4, CPU).tolist() == []
