"""8-bit floating point: rounded to the nearest, and never out of range."""

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

from gradwire.compressors.fp8 import Fp8
from gradwire.errors import ConfigError

both = pytest.mark.parametrize("kind", ["e4m3", "e5m2"])


def ideal_bits(codec: Fp8, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 8 + 32 / codec.bucket


def test_codes_by_hand() -> None:
    """The largest is 2^8 of e4m3 (exponent 15, bias 7) and 2^15 of e5m2 (exponent 30, bias 15)."""
    x = torch.tensor([2.0, -1.0, 0.0, 1.125])
    code, scales = Fp8().encode(x).parts
    assert scales.tolist() == [2.0]
    assert code.tolist() == [0b01111000, 0b11110000, 0, 0b01110001]
    code, _ = Fp8(format="e5m2").encode(x).parts
    assert code.tolist() == [0b01111000, 0b11110100, 0, 0b01110100]


@pytest.mark.parametrize(("kind", "steps"), [("e4m3", 8), ("e5m2", 4)])
def test_numbers_of_the_format_are_exact(kind: str, steps: int) -> None:
    x = torch.tensor([(1 + i / steps) * 2.0**e for e in range(-14, 0) for i in range(steps)])
    x = torch.cat([x, -x, torch.ones(1)])
    assert torch.equal(roundtrip(Fp8(format=kind), x), x)


def test_ties_go_to_the_even_neighbour() -> None:
    x = torch.tensor([2.0, 1 + 1 / 16, 1 + 3 / 16, -1 - 1 / 16])
    assert roundtrip(Fp8(), x).tolist() == [2.0, 1.0, 1.25, -1.0]


@pytest.mark.parametrize(("kind", "bound", "down"), [("e4m3", 1 / 16, -14), ("e5m2", 1 / 8, -29)])
def test_relative_error_is_within_its_bound(kind: str, bound: float, down: int) -> None:
    x = torch.logspace(down, 0, 10_001, base=2.0)
    x[-1] = 1
    error = (roundtrip(Fp8(format=kind, bucket=20_000), x) - x).abs() / x
    assert error.max() <= bound
    assert error.max() > 0.9 * bound / (1 + bound)


@both
def test_below_the_range_no_entry_is_off_by_more_than_itself(kind: str) -> None:
    x = torch.logspace(-60, 0, 10_001, base=2.0)
    x[-1] = 1
    out = roundtrip(Fp8(format=kind, bucket=20_000), x)
    assert ((out - x).abs() <= x).all()
    assert out[0] == 0


@both
@pytest.mark.parametrize("bucket", [1, 7, 128, 5000])
def test_the_largest_entry_of_a_bucket_is_exact(kind: str, bucket: int) -> None:
    x = normal(1280)
    decoded = roundtrip(Fp8(format=kind, bucket=bucket), x)
    for entries, out in zip(x.split(bucket), decoded.split(bucket), strict=True):
        place = entries.abs().argmax()
        assert out[place] == entries[place]


@both
def test_contraction(kind: str) -> None:
    spike = with_entry(torch.full((1000,), 1e-12), 3, -1.0)
    for x in (normal(1000), normal(1000) ** 5, torch.ones(1000), spike):
        assert squared_error(x, roundtrip(Fp8(format=kind), x)) < 1 / 64


@both
@pytest.mark.parametrize("numel", [0, 1, 7, 30])
def test_zeros_and_small_sizes(kind: str, numel: int) -> None:
    codec = Fp8(format=kind, bucket=10)
    assert torch.equal(roundtrip(codec, torch.zeros(numel)), torch.zeros(numel))
    assert torch.equal(roundtrip(codec, torch.full((numel,), -0.3)), torch.full((numel,), -0.3))


def test_a_bucket_of_zeros_beside_others() -> None:
    x = torch.cat([torch.zeros(20), normal(10)])
    decoded = roundtrip(Fp8(bucket=10), x)
    assert torch.equal(decoded[:20], torch.zeros(20))
    assert decoded[20:].isfinite().all()


@both
@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e15, 1e37])
def test_the_size_of_a_gradient_does_not_matter(kind: str, size: float) -> None:
    x = normal(1000)
    assert squared_error(x * size, roundtrip(Fp8(format=kind), x * size)) < 1 / 64


@both
@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_break_their_bucket(kind: str, exchange_name: str, bad: float) -> None:
    ranks = Ranks(f"fp8:format={kind},bucket=10", "none", exchange_name, (60,), size=3)
    out = ranks.step(normal(60), with_entry(normal(60), 7, bad), normal(60))
    assert not out[:10].isfinite().any()
    assert out[10:].isfinite().all()


def test_what_was_not_sent_comes_later() -> None:
    ranks = Ranks("fp8", "residual", "gather", (2,), size=1)
    assert ranks.step(torch.tensor([2.0, 1 + 1 / 16])).tolist() == [2.0, 1.0]
    assert ranks.step(torch.zeros(2)).tolist() == [0.0, 1 / 16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_has_the_type_of_the_gradient(dtype: torch.dtype) -> None:
    ranks = Ranks("fp8", "residual", "gather", (50,))
    assert ranks.step(*[normal(50).to(dtype)] * 2).dtype == dtype


@both
@pytest.mark.parametrize("bucket", [128, 1024])
def test_bits_on_the_wire(kind: str, bucket: int) -> None:
    expected = pytest.approx(8 + 32 / bucket, 0.001)
    assert bits_per_entry(Fp8(format=kind, bucket=bucket), normal(1_000_000)) == expected


def test_bytes_on_the_wire_are_frozen() -> None:
    assert wire_hash(Fp8(), eighths(1003)) == "737f09d7"
    assert wire_hash(Fp8(format="e5m2", bucket=128), eighths(1024)) == "5fd4bf58"


def test_unknown_format() -> None:
    message = r"^fp8: format must be one of \['e4m3', 'e5m2'\], got 'e3m4'$"
    with pytest.raises(ConfigError, match=message):
        Fp8(format="e3m4")


@pytest.mark.parametrize("bucket", [0, -1, 1.5, True])
def test_bucket_out_of_range(bucket: int) -> None:
    with pytest.raises(ConfigError, match=rf"^fp8: bucket must be .*at least 1, got {bucket!r}$"):
        Fp8(bucket=bucket)
