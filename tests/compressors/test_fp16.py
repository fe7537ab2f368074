"""Half precision: rounding, range, and sums that stay in it."""

import pytest
import torch
from few_ranks import Ranks, bits_per_entry, eighths, normal, roundtrip, wire_hash, with_entry
from torch import Tensor

from gradwire.compressors.fp16 import Fp16

LARGEST = 65504.0


def ideal_bits(codec: Fp16, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 16


def test_rounds_to_half_precision() -> None:
    x = torch.tensor([1.0, 1 + 2.0**-11, 1 + 2.0**-10, -0.1])
    assert roundtrip(Fp16(), x).tolist() == [1.0, 1.0, 1 + 2.0**-10, -0.0999755859375]


def test_relative_error_is_bounded() -> None:
    x = normal(100_000) * torch.logspace(-3, 3, 100_000)
    x = x[(x.abs() > 6.2e-5) & (x.abs() < LARGEST)]
    assert ((roundtrip(Fp16(), x) - x).abs() <= x.abs() * 2.0**-11).all()


@pytest.mark.parametrize("size", [65504.0, 65519.0, 65520.0, 1e5, 1e10, 1e30])
def test_finite_entries_stay_finite(size: float) -> None:
    assert roundtrip(Fp16(), torch.tensor([size, -size])).tolist() == [LARGEST, -LARGEST]


def test_infinity_and_nan_stay_what_they_are() -> None:
    out = roundtrip(Fp16(), torch.tensor([torch.inf, -torch.inf, torch.nan]))
    assert out[:2].tolist() == [torch.inf, -torch.inf]
    assert out[2].isnan()


@pytest.mark.parametrize("exchange_name", ["mean", "gather", "sharded"])
@pytest.mark.parametrize("value", [60000.0, -65504.0])
def test_sums_of_large_entries_do_not_overflow(exchange_name: str, value: float) -> None:
    ranks = Ranks("fp16", "none", exchange_name, (9,), size=4)
    out = ranks.step(*[torch.full((9,), value)] * 4)
    assert out.tolist() == [value] * 9


@pytest.mark.parametrize("size", [3, 5, 7, 12, 33])
def test_means_near_the_end_of_the_range_stay_finite_however_ranks_round(size: int) -> None:
    ranks = Ranks("fp16", "none", "mean", (9,), size=size)
    out = ranks.step(*[torch.full((9,), 61440.0)] * size)
    torch.testing.assert_close(out, torch.full((9,), 61440.0), rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("exchange_name", ["mean", "gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_reach_all_ranks(exchange_name: str, bad: float) -> None:
    ranks = Ranks("fp16", "none", exchange_name, (50,), size=3)
    out = ranks.step(normal(50), with_entry(normal(50), 7, bad), normal(50))
    assert out.isfinite().logical_not().nonzero().tolist() == [[7]]


def test_saturation_error_stays_in_the_residual() -> None:
    ranks = Ranks("fp16", "residual", "gather", (1,))
    ranks.step(*[torch.tensor([1e5])] * 2)
    assert ranks.residual().tolist() == [1e5 - LARGEST]
    assert ranks.step(*[torch.zeros(1)] * 2).item() == pytest.approx(1e5 - LARGEST, rel=1e-3)


def test_bits_on_the_wire() -> None:
    assert bits_per_entry(Fp16(), normal(1_000_000)) == 16


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(Fp16(), eighths(1000)) == "75c3dde0"
