"""1-bit SGD: two means, the best two numbers for the two sides."""

import pytest
import torch
from few_ranks import (
    Ranks,
    bits_per_entry,
    eighths,
    normal,
    roundtrip,
    squared_error,
    wire_hash,
    with_entry,
)
from torch import Tensor

from gradwire.compressors.efsign import EFSign
from gradwire.compressors.onebit import OneBit
from gradwire.errors import ConfigError


def ideal_bits(codec: OneBit, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 1 + (64 / codec.bucket if codec.bucket else 0)


def test_the_means_of_the_two_sides(backend: str) -> None:
    x = torch.tensor([-1.0, -3.0, 2.0, 4.0])
    bits, low, high = OneBit().encode(x).parts
    assert (bits.tolist(), low.tolist(), high.tolist()) == ([0b0011], [-2.0], [3.0])
    assert roundtrip(OneBit(), x).tolist() == [-2.0, -2.0, 3.0, 3.0]


def test_zero_counts_as_not_negative() -> None:
    x = torch.tensor([0.0, -4.0, 2.0])
    assert roundtrip(OneBit(), x).tolist() == [1.0, -4.0, 1.0]


def test_buckets_have_their_own_means() -> None:
    """The last one is shorter, and what fills it up is no entry."""
    x = torch.tensor([1.0, 3.0, -1.0, 5.0, -5.0, -7.0, 8.0])
    assert roundtrip(OneBit(bucket=3), x).tolist() == [2.0, 2.0, -1.0, 5.0, -6.0, -6.0, 8.0]


@pytest.mark.parametrize("bucket", [0, 1, 64, 5000])
def test_two_numbers_a_bucket_are_sent_exactly(bucket: int) -> None:
    x = torch.where(torch.arange(1000) % 3 == 0, -0.25, 8.0)
    assert torch.equal(roundtrip(OneBit(bucket=bucket), x), x)


@pytest.mark.parametrize("numel", [1, 7, 8, 1000, 4097])
def test_error_formula(backend: str, numel: int) -> None:
    """|x|² - n₋a₋² - n₊a₊², on numbers whose sums are exact."""
    x = eighths(numel).double()
    sides = [side for side in (x[x < 0], x[x >= 0]) if side.numel()]
    exact = x.square().sum() - sum(side.numel() * side.mean() ** 2 for side in sides)
    error = (x - roundtrip(OneBit(), x).double()).square().sum()
    torch.testing.assert_close(error, exact, rtol=1e-5, atol=1e-5 * float(x.square().sum()))


def test_no_other_two_numbers_are_closer_nor_is_efsign() -> None:
    x = normal(1000) + 0.3
    out = roundtrip(OneBit(), x)
    for low, high in ((0.99, 1.0), (1.01, 1.0), (1.0, 0.99), (1.0, 1.01)):
        other = torch.where(x < 0, out * low, out * high)
        assert squared_error(x, out) < squared_error(x, other)
    assert squared_error(x, out) < squared_error(x, roundtrip(EFSign(), x))


@pytest.mark.parametrize("bucket", [0, 100])
def test_contraction(bucket: int) -> None:
    spike = with_entry(torch.full((1000,), 1e-6), 3, -1.0)
    for x in (normal(1000), normal(1000) ** 5, torch.ones(1000), spike, normal(1000).abs()):
        bound = 1 - x.double().abs().sum() ** 2 / x.double().square().sum() / 1000
        assert squared_error(x, roundtrip(OneBit(bucket=bucket), x)) <= bound + 1e-6


def test_what_was_not_sent_comes_later() -> None:
    ranks = Ranks("onebit", "residual", "gather", (2,), size=1)
    assert ranks.step(torch.tensor([3.0, 1.0])).tolist() == [2.0, 2.0]
    assert ranks.residual().tolist() == [1.0, -1.0]
    assert ranks.step(torch.zeros(2)).tolist() == [1.0, -1.0]
    assert ranks.residual().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_result_is_the_mean_over_ranks_not_the_sum(exchange_name: str, size: int) -> None:
    ranks = Ranks("onebit", "none", exchange_name, (6,), size=size)
    out = ranks.step(*[torch.full((6,), 1.0 + rank) for rank in range(size)])
    assert out.tolist() == pytest.approx([(1 + size) / 2] * 6)


@pytest.mark.parametrize("bucket", [0, 10])
@pytest.mark.parametrize("numel", [0, 1, 7, 30])
def test_zeros_and_small_sizes(backend: str, bucket: int, numel: int) -> None:
    codec = OneBit(bucket=bucket)
    assert torch.equal(roundtrip(codec, torch.zeros(numel)), torch.zeros(numel))
    assert torch.equal(roundtrip(codec, torch.full((numel,), -3.0)), torch.full((numel,), -3.0))


@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e25, 1e37])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    x = eighths(1000)
    assert squared_error(x * size, roundtrip(OneBit(), x * size)) < 0.3


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_appear(backend: str, exchange_name: str, bad: float) -> None:
    ranks = Ranks("onebit:bucket=10", "none", exchange_name, (60,), size=3)
    out = ranks.step(normal(60), with_entry(normal(60), 7, bad), normal(60))
    assert not out[7].isfinite()
    assert out[10:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_has_the_type_of_the_gradient(dtype: torch.dtype) -> None:
    ranks = Ranks("onebit", "residual", "gather", (50,))
    assert ranks.step(*[normal(50).to(dtype)] * 2).dtype == dtype


def test_bits_on_the_wire() -> None:
    assert bits_per_entry(OneBit(), normal(1_000_000)) <= 1.01
    expected = pytest.approx(1 + 64 / 1024, 0.01)
    assert bits_per_entry(OneBit(bucket=1024), normal(1_000_000)) == expected


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(OneBit(), eighths(1003)) == "c32d457e"
    assert wire_hash(OneBit(bucket=100), eighths(1003)) == "cdea8d17"


@pytest.mark.parametrize("bucket", [-1, 1.5, True, "8"])
def test_bucket_out_of_range(bucket: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"^onebit: bucket must be .*at least 0, got {bucket!r}$"
    ):
        OneBit(bucket=bucket)
