"""SketchML's quantile buckets: the mean of its bin for every entry."""

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

from gradwire.compressors.sketchml import SketchML
from gradwire.errors import ConfigError
from gradwire.types import EncodeContext
from gradwire.wire.bits import unpack_bits

every_bits = pytest.mark.parametrize("bits", range(1, 9))


def ideal_bits(codec: SketchML, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return codec.bits


def test_by_hand() -> None:
    """Quartiles of eight are -3, -1 and 2; the boundary at -1, nearest to zero, moves there."""
    x = torch.tensor([2.0, -1.0, 4.0, -5.0, 1.0, -3.0, 10.0, -2.0])
    codes, means = SketchML(bits=2).encode(x).parts
    assert means.tolist() == [-4.0, -1.5, 1.5, 7.0]
    assert unpack_bits(codes, 2, 8).tolist() == [2, 1, 3, 0, 2, 0, 3, 1]
    assert roundtrip(SketchML(bits=2), x).tolist() == [1.5, -1.5, 7.0, -4.0, 1.5, -4.0, 7.0, -1.5]


@every_bits
def test_every_bin_decodes_to_its_mean_and_is_used(bits: int) -> None:
    x = normal(20_000)
    payload = SketchML(bits=bits).encode(x)
    codes = unpack_bits(payload.parts[0], bits, 20_000)
    counts = torch.bincount(codes, minlength=2**bits)
    # Equal shares as far as a sample of 8192 shows; two bins meet at the boundary at zero.
    assert counts.max() <= 2.5 * 20_000 / 2**bits
    assert (counts > 0).all()
    out = SketchML(bits=bits).decode(payload)
    for code in range(2**bits):
        torch.testing.assert_close(out[codes == code].mean(), x[codes == code].mean())


@every_bits
def test_every_bit_takes_more_than_half_of_the_error(bits: int) -> None:
    """From 1 - 2/π, that of two means. Bins of equal share are wide in the tails, so not 3/4."""
    x = normal(20_000)
    assert squared_error(x, roundtrip(SketchML(bits=bits), x)) < 0.37 * 0.5 ** (bits - 1)


def test_a_small_sample_is_nearly_as_good() -> None:
    x = normal(100_000)
    exact = squared_error(x, roundtrip(SketchML(bits=4, sample=100_000), x))
    assert squared_error(x, roundtrip(SketchML(bits=4, sample=1000), x)) < 1.3 * exact


def test_closer_than_zero_whatever_the_sample() -> None:
    """No bin mixes signs, so none cancels: even where the sample sees nothing of what matters."""
    rare = torch.zeros(10_000)
    rare[5], rare[6], rare[7] = 100.0, -100.0, 1.0
    pair = torch.tensor([1.0, -1.0])
    for x in (rare, rare + 1e-3, pair, normal(1000) ** 5, normal(1000).abs() + 3):
        for bits in (1, 2, 8):
            out = roundtrip(SketchML(bits=bits, sample=3), x)
            assert squared_error(x, out) < 1 - 1 / x.numel() + 1e-6
            assert (out * x >= 0).all()


def test_the_sum_is_exact() -> None:
    x = normal(10_000).double()
    out = roundtrip(SketchML(bits=3, sample=50), x.float())
    assert float(out.double().sum()) == pytest.approx(float(x.sum()), abs=1e-2)


def test_zeros_have_a_bin_of_their_own_where_they_are_many() -> None:
    x = torch.where(torch.arange(3000) % 3 == 0, normal(3000), 0.0)
    out = roundtrip(SketchML(bits=4), x)
    assert torch.equal(out == 0, x == 0)
    assert squared_error(x, out) < 0.1


def test_few_different_values_are_exact() -> None:
    x = torch.tensor([-2.0, -1.0, 0.0, 0.5, 3.0]).repeat(100)
    assert torch.equal(roundtrip(SketchML(bits=4), x), x)


@pytest.mark.parametrize("numel", [0, 1, 7])
@pytest.mark.parametrize("value", [0.0, 1.5, -1.5])
def test_constants_and_sizes(numel: int, value: float) -> None:
    x = torch.full((numel,), value)
    for bits in (1, 2, 8):
        assert torch.equal(roundtrip(SketchML(bits=bits), x), x)


@pytest.mark.parametrize("size", [1e-36, 1e37])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    x = normal(1000) * size
    assert squared_error(x, roundtrip(SketchML(bits=6), x)) < 0.01


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", [1, 4])
def test_non_finite_entries_break_their_bin(exchange_name: str, bad: float, bits: int) -> None:
    ranks = Ranks(f"sketchml:bits={bits}", "none", exchange_name, (300,), size=3)
    out = ranks.step(normal(300), with_entry(normal(300), 7, bad), normal(300))
    assert not out[7].isfinite()
    assert out.isfinite().any()


def test_all_bad() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not roundtrip(SketchML(), torch.full((50,), bad)).isfinite().any()


def test_ranks_and_steps_sample_independently() -> None:
    codec, x, ctx = (
        SketchML(bits=4, sample=100),
        normal(10_000),
        EncodeContext((10_000,), world_size=2),
    )
    first = roundtrip(codec, x, ctx)
    for other in (ctx._replace(rank=1), ctx._replace(step=1), ctx._replace(seed=1)):
        assert not torch.equal(roundtrip(codec, x, other), first)


@every_bits
def test_bits_on_the_wire(bits: int) -> None:
    """256 bins take 8 bits, not 16."""
    cost = bits_per_entry(SketchML(bits=bits), normal(1_000_000))
    assert cost == pytest.approx(bits + 32 * 2**bits / 1e6, rel=1e-4)
    assert cost <= 1.05 * bits


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(SketchML(bits=6), eighths(1000)) == "7212f138"
    assert wire_hash(SketchML(bits=3, sample=100), eighths(1003)) == "d30c64db"


@pytest.mark.parametrize("bits", [0, -1, 9, 4.0])
def test_bits_out_of_range(bits: int) -> None:
    with pytest.raises(ConfigError, match=rf"^sketchml: bits must be .*1 to 8, got {bits}$"):
        SketchML(bits=bits)


@pytest.mark.parametrize("sample", [0, -1, 1.5])
def test_sample_out_of_range(sample: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"^sketchml: sample must be .*at least 1, got {sample}$"
    ):
        SketchML(sample=sample)
