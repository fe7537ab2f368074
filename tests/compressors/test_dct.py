"""Chunked cosine transform: the largest coefficients of every chunk and no others."""

import math

import pytest
import torch
from few_ranks import (
    Ranks,
    bits_per_entry,
    eighths,
    normal,
    roundtrip,
    selection_bits,
    squared_error,
    wire_hash,
    with_entry,
)
from torch import Tensor

from gradwire.compressors.dct import DCT, cosines
from gradwire.errors import ConfigError
from gradwire.wire.bits import unpack_bits


def ideal_bits(codec: DCT, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return (selection_bits(codec.chunk, codec.k) + 16 * codec.k) / codec.chunk


def test_by_hand() -> None:
    """(3, 1) is 2√2 (1, 1)/√2 + √2 (1, -1)/√2, and (1, -2) is sent as its difference."""
    places, values = DCT(chunk=2, k=1).encode(torch.tensor([3.0, 1.0, 1.0, -2.0])).parts
    assert unpack_bits(places, 1, 2).tolist() == [0, 1]
    torch.testing.assert_close(values.float(), torch.tensor([8.0, 4.5]).sqrt(), rtol=4e-3, atol=0)
    out = roundtrip(DCT(chunk=2, k=1), torch.tensor([3.0, 1.0, 1.0, -2.0]))
    torch.testing.assert_close(out, torch.tensor([2.0, 2.0, 1.5, -1.5]), rtol=4e-3, atol=0)


@pytest.mark.parametrize("size", [2, 8, 64, 1024])
def test_the_transform_is_orthonormal(size: int) -> None:
    waves = cosines(size, torch.device("cpu"))
    torch.testing.assert_close(waves @ waves.T, torch.eye(size), rtol=0, atol=1e-5)
    # Row f has f changes of sign: it is ordered by frequency.
    assert ((waves[:, 1:] * waves[:, :-1]) < 0).sum(1).tolist() == list(range(size))


def test_exact_on_few_frequencies() -> None:
    """Three waves and another three in the next chunk, but for the rounding to bf16."""
    waves = cosines(64, torch.device("cpu"))
    x = torch.cat([waves[0] - 3 * waves[5] + waves[63], 2 * waves[1] + waves[2] - waves[33]])
    torch.testing.assert_close(roundtrip(DCT(chunk=64, k=3), x), x, rtol=0, atol=1e-5)


def test_smooth_gradients_need_little() -> None:
    x = torch.sin(torch.arange(4096) / 50) * torch.arange(4096)
    assert squared_error(x, roundtrip(DCT(chunk=64, k=2), x)) < 0.02


@pytest.mark.parametrize(("chunk", "k"), [(64, 1), (64, 16), (8, 8), (256, 3), (2, 1)])
@pytest.mark.parametrize("numel", [1000, 1024, 50])
def test_error_is_at_most_what_an_even_spread_would_lose(chunk: int, k: int, numel: int) -> None:
    codec = DCT(chunk=chunk, k=k)
    flat_spectrum = cosines(chunk, torch.device("cpu")).sum(0).repeat(numel)[:numel]
    for x in (normal(numel), torch.ones(numel), normal(numel) ** 5, flat_spectrum):
        assert squared_error(x, roundtrip(codec, x)) <= 1 - k / chunk + 2.0**-16


def test_one_constant_coefficient_encodes_a_constant() -> None:
    for numel in (64, 640):
        x = torch.full((numel,), -2.0)
        assert torch.equal(roundtrip(DCT(), x), x)


def test_keeps_the_largest_coefficients() -> None:
    x = normal(640)
    waves = x.view(10, 64) @ cosines(64, x.device).T
    sent = roundtrip(DCT(chunk=64, k=5), x).view(10, 64) @ cosines(64, x.device).T
    kept = sent.abs() > 1e-3
    assert kept.sum(1).tolist() == [5] * 10
    assert (waves.abs().masked_fill(~kept, math.inf).amin(1) >= (waves * ~kept).abs().amax(1)).all()
    torch.testing.assert_close(sent[kept], waves[kept], rtol=4e-3, atol=1e-5)


def test_the_mean_is_over_all_ranks() -> None:
    ranks = Ranks("dct:chunk=2,k=1", "none", "gather", (2,))
    out = ranks.step(torch.tensor([4.0, 4.0]), torch.tensor([2.0, -2.0]))
    torch.testing.assert_close(out, torch.tensor([3.0, 1.0]), rtol=4e-3, atol=0)


def test_all_comes_in_time() -> None:
    ranks = Ranks("dct:chunk=8,k=2", "residual", "gather", (20,), size=1)
    x = normal(20)
    decoded = ranks.step(x)
    for _ in range(15):
        decoded = decoded + ranks.step(torch.zeros(20))
    torch.testing.assert_close(decoded, x, rtol=0, atol=1e-4)


@pytest.mark.parametrize("numel", [0, 1, 7, 65])
def test_zeros_stay_zeros(numel: int) -> None:
    assert torch.equal(roundtrip(DCT(), torch.zeros(numel)), torch.zeros(numel))
    assert roundtrip(DCT(), torch.ones(numel)).shape == (numel,)


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_break_their_chunk(exchange_name: str, bad: float) -> None:
    ranks = Ranks("dct:chunk=8,k=2", "none", exchange_name, (72,), size=3)
    out = ranks.step(normal(72), with_entry(normal(72), 5, bad), normal(72))
    assert not out[5].isfinite()
    assert out[8:].isfinite().all()


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    x = normal(640) * size
    assert squared_error(x, roundtrip(DCT(chunk=64, k=64), x)) < 2.0**-16


def test_bits_on_the_wire() -> None:
    """log2(chunk) bits of position and 16 of value for each coefficient."""
    x = normal(1_000_000)
    assert bits_per_entry(DCT(chunk=64, k=1), x) == pytest.approx((6 + 16) / 64, rel=1e-4)
    assert bits_per_entry(DCT(chunk=256, k=16), x) == pytest.approx((8 + 16) / 16, rel=1e-3)


@pytest.mark.parametrize(("chunk", "k"), [(64, 6), (64, 1), (1024, 1)])
def test_bits_are_near_the_entropy(chunk: int, k: int) -> None:
    codec, x = DCT(chunk=chunk, k=k), normal(1_000_000)
    assert bits_per_entry(codec, x) <= 1.4 * ideal_bits(codec, x)


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(DCT(chunk=64, k=2), eighths(1000)) == "389d29a6"
    assert wire_hash(DCT(chunk=16, k=3), eighths(129)) == "2ff6836f"


@pytest.mark.parametrize("chunk", [0, 1, -64, 8192, 64.0])
def test_chunk_out_of_range(chunk: int) -> None:
    with pytest.raises(ConfigError, match=rf"^dct: chunk must be .*2 to 4096, got {chunk}$"):
        DCT(chunk=chunk)


def test_chunk_that_is_no_power_of_two() -> None:
    with pytest.raises(ConfigError, match=r"^dct: chunk must be a power of 2, got 48$"):
        DCT(chunk=48)


@pytest.mark.parametrize("k", [0, -1, 65, 1.5])
def test_k_out_of_range(k: int) -> None:
    with pytest.raises(ConfigError, match=rf"^dct: k must be .*1 to 64, got {k}$"):
        DCT(chunk=64, k=k)
