"""Brain float: the range of float32, three digits."""

import pytest
import torch
from few_ranks import Ranks, bits_per_entry, eighths, normal, roundtrip, wire_hash, with_entry
from torch import Tensor

from gradwire.compressors.bf16 import Bf16


def ideal_bits(codec: Bf16, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 16


def test_rounds_to_eight_bits_of_significand() -> None:
    x = torch.tensor([1.0, 1 + 2.0**-8, 1 + 2.0**-7, -3.140625])
    assert roundtrip(Bf16(), x).tolist() == [1.0, 1.0, 1 + 2.0**-7, -3.140625]


def test_relative_error_is_bounded() -> None:
    x = normal(100_000) * torch.logspace(-30, 30, 100_000)
    assert ((roundtrip(Bf16(), x) - x).abs() <= x.abs() * 2.0**-8).all()


def test_no_overflow() -> None:
    x = torch.tensor([1e5, 1e30, -3e38, 3.38e38])
    assert roundtrip(Bf16(), x).isfinite().all()


@pytest.mark.parametrize("exchange_name", ["mean", "gather", "sharded"])
def test_sums_of_large_entries_do_not_overflow(exchange_name: str) -> None:
    ranks = Ranks("bf16", "none", exchange_name, (9,), size=4)
    assert ranks.step(*[torch.full((9,), 2.0**127)] * 4).tolist() == [2.0**127] * 9


@pytest.mark.parametrize("exchange_name", ["mean", "gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_reach_all_ranks(exchange_name: str, bad: float) -> None:
    ranks = Ranks("bf16", "none", exchange_name, (50,), size=3)
    out = ranks.step(normal(50), with_entry(normal(50), 7, bad), normal(50))
    assert out.isfinite().logical_not().nonzero().tolist() == [[7]]


def test_bits_on_the_wire() -> None:
    assert bits_per_entry(Bf16(), normal(1_000_000)) == 16


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(Bf16(), eighths(1000)) == "7fd549d1"
