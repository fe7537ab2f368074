"""8-bit dynamic tree: the nearest level, and the largest entry itself."""

import pytest
import torch
from few_ranks import (
    CPU,
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

from gradwire.compressors.eightbit import EightBit
from gradwire.errors import ConfigError
from gradwire.kernels.reference.rounding import tree


def ideal_bits(codec: EightBit, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 8 + 32 / codec.bucket


def test_codes_by_hand() -> None:
    """1 has all bits set; 0.1 tops the decade below, a bit less; 1e-6 is the last bit alone."""
    x = torch.tensor([2.0, -0.2, 0.0, 2e-6, 2 * 0.55])
    code, scales = EightBit().encode(x).parts
    assert scales.tolist() == [2.0]
    assert code.tolist() == [0b1111111, 0b10111111, 0, 0b0000001, 0b1011111]
    torch.testing.assert_close(roundtrip(EightBit(), x), x)


def test_levels_are_a_tree_of_decades() -> None:
    level = tree(CPU)
    assert level.numel() == 128
    assert (level[1:] > level[:-1]).all()
    for k in range(7):
        top = 10.0 ** (k - 6)
        assert level[(2 << k) - 1] == pytest.approx(top, rel=1e-15)
        inside = level[1 << k : 2 << k]
        steps = torch.diff(inside, prepend=torch.tensor([top / 10], dtype=torch.float64))
        torch.testing.assert_close(steps, torch.full_like(steps, 0.9 * top / (1 << k)))
    assert level[-1] == 1


def test_every_level_of_every_sign_is_exact() -> None:
    level = tree(CPU).float()
    x = torch.cat([level, -level])
    assert torch.equal(roundtrip(EightBit(), x), x)


def test_the_nearest_level_is_sent_not_the_one_below() -> None:
    x = torch.cat([normal(2000).abs().clamp(max=1), torch.logspace(-8, 0, 2001)])
    x[-1] = 1
    out = roundtrip(EightBit(bucket=5000), x)
    nearest = (x.unsqueeze(1) - tree(CPU).float()).abs().amin(1)
    torch.testing.assert_close((out - x).abs(), nearest, rtol=1e-3, atol=1e-9)
    assert (out > x).any()


@pytest.mark.parametrize("bucket", [1, 7, 128, 5000])
def test_the_largest_entry_of_a_bucket_is_exact(bucket: int) -> None:
    x = normal(1280)
    decoded = roundtrip(EightBit(bucket=bucket), x)
    for entries, out in zip(x.split(bucket), decoded.split(bucket), strict=True):
        place = entries.abs().argmax()
        assert out[place] == entries[place]


def test_error_is_within_its_bounds() -> None:
    x = normal(100_000)
    x = x / x.abs().max()
    error = (roundtrip(EightBit(bucket=100_000), x) - x).abs()
    assert error.max() <= 0.00704
    large = x.abs() >= 0.1
    assert (error[large] / x[large].abs()).max() <= 0.07
    assert (error <= x.abs()).all()


def test_contraction() -> None:
    spike = with_entry(torch.full((1000,), 1e-8), 3, -1.0)
    for x in (normal(1000), normal(1000) ** 5, torch.ones(1000), spike):
        assert squared_error(x, roundtrip(EightBit(), x)) < 1e-3


@pytest.mark.parametrize("numel", [0, 1, 7, 30])
def test_zeros_and_small_sizes(numel: int) -> None:
    codec = EightBit(bucket=10)
    assert torch.equal(roundtrip(codec, torch.zeros(numel)), torch.zeros(numel))
    assert torch.equal(roundtrip(codec, torch.full((numel,), -0.3)), torch.full((numel,), -0.3))


def test_a_bucket_of_zeros_beside_others() -> None:
    x = torch.cat([torch.zeros(20), normal(10)])
    decoded = roundtrip(EightBit(bucket=10), x)
    assert torch.equal(decoded[:20], torch.zeros(20))
    assert decoded[20:].isfinite().all()


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e15, 1e37])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    x = normal(1000)
    assert squared_error(x * size, roundtrip(EightBit(), x * size)) < 1e-3


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_break_their_bucket(exchange_name: str, bad: float) -> None:
    ranks = Ranks("eightbit:bucket=10", "none", exchange_name, (60,), size=3)
    out = ranks.step(normal(60), with_entry(normal(60), 7, bad), normal(60))
    assert not out[:10].isfinite().any()
    assert out[10:].isfinite().all()


def test_what_was_not_sent_comes_later() -> None:
    ranks = Ranks("eightbit", "residual", "gather", (2,), size=1)
    first = ranks.step(torch.tensor([1.0, 0.553]))
    assert first.tolist() == pytest.approx([1.0, 0.55])
    second = ranks.step(torch.zeros(2))
    assert second.tolist() == pytest.approx([0.0, 0.003], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_has_the_type_of_the_gradient(dtype: torch.dtype) -> None:
    ranks = Ranks("eightbit", "residual", "gather", (50,))
    assert ranks.step(*[normal(50).to(dtype)] * 2).dtype == dtype


@pytest.mark.parametrize("bucket", [128, 1024])
def test_bits_on_the_wire(bucket: int) -> None:
    expected = pytest.approx(8 + 32 / bucket, 0.001)
    assert bits_per_entry(EightBit(bucket=bucket), normal(1_000_000)) == expected


def test_bytes_on_the_wire_are_frozen() -> None:
    assert wire_hash(EightBit(), eighths(1003)) == "754013b1"
    assert wire_hash(EightBit(bucket=128), eighths(1024)) == "45326017"


@pytest.mark.parametrize("bucket", [0, -1, 1.5, True])
def test_bucket_out_of_range(bucket: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"^eightbit: bucket must be .*at least 1, got {bucket!r}$"
    ):
        EightBit(bucket=bucket)
