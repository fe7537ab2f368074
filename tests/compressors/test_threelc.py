"""3LC: three values, runs of zeros in one byte, and no bytes that lead astray."""

import math

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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.compressors.threelc import ThreeLC, lengthen, shorten
from gradwire.errors import ConfigError, WireError
from gradwire.types import EncodeContext
from gradwire.wire.layout import pack, unpack

every_sparsity = pytest.mark.parametrize("sparsity", [1.0, 1.5, 1.75, 1.99])


def byte_tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def ideal_bits(codec: ThreeLC, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return math.log2(3)


def test_by_hand() -> None:
    """Above half of M = 4 is M; then ten zeros are two bytes, which one stands for."""
    x = torch.cat([torch.tensor([4.0, -2.0, 2.1, 0.0, -3.0]), torch.zeros(10)])
    scale, coded = ThreeLC().encode(x).parts
    assert scale.tolist() == [4.0]
    assert coded.tolist() == [2 + 1 * 3 + 2 * 9 + 1 * 27 + 0 * 81, 243]
    assert roundtrip(ThreeLC(), x)[:5].tolist() == [4.0, 0.0, 4.0, 0.0, -4.0]


def test_sparsity_makes_more_zeros() -> None:
    x = torch.tensor([1.0, 0.8, 0.7, 0.4])
    assert roundtrip(ThreeLC(sparsity=1.5), x).tolist() == [1.5, 1.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("run", "coded"),
    [(0, []), (1, [121]), (2, [243]), (14, [255]), (15, [255, 121]), (16, [255, 243]),
     (28, [255, 255]), (31, [255, 255, 244])],
)  # fmt: skip
def test_runs_of_zeros(run: int, coded: list[int]) -> None:
    assert shorten(byte_tensor([7] + [121] * run + [7])).tolist() == [7, *coded, 7]
    assert shorten(byte_tensor([121] * run)).tolist() == coded


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 120, 121, 121, 121, 242]), st.integers(1, 40))).map(
        lambda runs: [byte for byte, count in runs for _ in range(count)]
    )
)
def test_shortened_and_lengthened_is_the_same(values: list[int]) -> None:
    coded = shorten(byte_tensor(values))
    assert coded.numel() <= len(values)
    assert lengthen(coded, len(values)).tolist() == values


@every_sparsity
def test_contraction(sparsity: float) -> None:
    codec = ThreeLC(sparsity=sparsity)
    for x in (normal(1000), normal(1000) ** 5, torch.ones(1000), eighths(1000)):
        out = roundtrip(codec, x)
        assert ((out - x).abs() <= x.abs() * (1 + 1e-6)).all()
        best = float(x.abs().max() ** 2 / x.square().sum()) * sparsity * (2 - sparsity)
        assert squared_error(x, out) <= 1 - best + 1e-6


@pytest.mark.parametrize("value", [3.0, -1e-30, 1e30])
@pytest.mark.parametrize("numel", [1, 7, 1000])
def test_constant_and_one_element_tensors_are_exact(numel: int, value: float) -> None:
    x = torch.full((numel,), value)
    assert torch.equal(roundtrip(ThreeLC(), x), x)


@every_sparsity
def test_what_was_not_sent_comes_later(sparsity: float) -> None:
    ranks = Ranks(f"threelc:sparsity={sparsity}", "residual", "gather", (40,), size=2)
    x = [normal(40, seed=s) for s in range(2)]
    total = torch.stack([ranks.step(*x) for _ in range(400)]).mean(0)
    torch.testing.assert_close(total, sum(x) / 2, rtol=0, atol=0.1)


def test_ranks_may_send_messages_of_different_lengths() -> None:
    ranks = Ranks("threelc", "none", "gather", (100,), size=3)
    one = with_entry(torch.zeros(100), 50, 3.0)
    out = ranks.step(torch.zeros(100), one, torch.ones(100))
    torch.testing.assert_close(out, (one + 1) / 3)


def test_bits_on_the_wire() -> None:
    x = normal(1_000_000)
    bits = [bits_per_entry(ThreeLC(sparsity=s), x) for s in (1.0, 1.75, 1.99)]
    assert bits[0] == pytest.approx(0.306, abs=0.01)
    assert bits == sorted(bits, reverse=True)
    assert bits_per_entry(ThreeLC(), x.sign()) == pytest.approx(1.6, rel=1e-3)
    assert bits_per_entry(ThreeLC(), torch.zeros(1_000_000)) == pytest.approx(8 / 70, rel=0.01)
    assert ThreeLC().nbytes((1000, 1000)) == ThreeLC().encode(x.sign()).nbytes


@every_sparsity
@pytest.mark.parametrize("numel", [0, 1, 7])
def test_zeros_and_small_sizes(sparsity: float, numel: int) -> None:
    codec = ThreeLC(sparsity=sparsity)
    assert torch.equal(roundtrip(codec, torch.zeros(numel)), torch.zeros(numel))
    assert roundtrip(codec, normal(numel)).isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_appear(bad: float) -> None:
    ranks = Ranks("threelc", "none", "gather", (60,), size=3)
    out = ranks.step(normal(60), with_entry(normal(60), 7, bad), normal(60))
    assert not out[7].isfinite()


@settings(deadline=None)
@given(noise=st.binary(max_size=30), numel=st.integers(0, 300))
def test_hostile_bytes_are_refused_or_harmless(noise: bytes, numel: int) -> None:
    codec = ThreeLC()
    parts = (torch.ones(1), byte_tensor(list(noise)))
    layout = codec.layout(numel)
    try:
        [decoded] = unpack(pack([parts], [layout]), [layout])
    except WireError:
        return
    out = torch.zeros(numel)
    codec.decode_add(out, [decoded], 1.0, EncodeContext((out.numel(),)))
    assert (out.abs() <= 1).all()


@pytest.mark.parametrize("coded", [[], [121], [243, 121], [255], [255] * 1000])
def test_messages_of_another_tensor_are_refused(coded: list[int]) -> None:
    layout = ThreeLC().layout(10)
    packed = pack([(torch.ones(1), byte_tensor(coded))], [layout])
    with pytest.raises(WireError, match="bytes of trits of a tensor of 10"):
        unpack(packed, [layout])


def test_bytes_on_the_wire_are_frozen() -> None:
    assert wire_hash(ThreeLC(), eighths(1003) ** 5) == "75a3a8bc"  # type: ignore[arg-type]
    assert wire_hash(ThreeLC(sparsity=1.75), eighths(1003)) == "33f499d7"  # type: ignore[arg-type]


@pytest.mark.parametrize("sparsity", [0.9, 2.0, float("nan"), "1", True])
def test_sparsity_out_of_range(sparsity: float) -> None:
    with pytest.raises(ConfigError, match=r"^threelc: sparsity must be in \[1, 2\), got "):
        ThreeLC(sparsity=sparsity)
