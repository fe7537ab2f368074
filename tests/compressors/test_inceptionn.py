"""INCEPTIONN: as many bits as the magnitude needs, and no error above the bound."""

import pytest
import torch
from few_ranks import Ranks, bits_per_entry, eighths, normal, roundtrip, wire_hash, with_entry
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.compressors.inceptionn import Inceptionn
from gradwire.errors import ConfigError, WireError
from gradwire.types import EncodeContext, Parts
from gradwire.wire.layout import pack, unpack

BOUNDS = [2.0**-k for k in range(1, 15)] + [0.3, 0.01, 1e-3, 1e-4]
every_bound = pytest.mark.parametrize("bound", BOUNDS)


def magnitudes() -> torch.Tensor:
    """Of both signs, from far below every bound to above one."""
    sizes = torch.logspace(-20, 3, 5001, base=2.0)
    return torch.cat([sizes, -sizes])


def ideal_bits(codec: Inceptionn, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    k, m = codec.thresholds()
    shares = [float((x.abs() >= threshold).float().mean()) for threshold in (2.0**-k, 2.0**-m, 1.0)]
    return 2 + 8 * shares[0] + 8 * shares[1] + 16 * shares[2]


def test_by_hand() -> None:
    """Bound 2^-10: 8 bits are multiples of 2^-12 below 2^-5, 16 bits of 2^-15 below 1."""
    x = torch.tensor([1.5, -0.5, 2.0**-10, 2.0**-11, -0.03])
    tags, small, middle, large = Inceptionn().encode(x).parts
    assert tags.tolist() == [3 | 2 << 2 | 1 << 4 | 0 << 6, 1]
    assert small.tolist() == [4, -123]
    assert middle.tolist() == [-(2**14)]
    assert large.tolist() == [1.5]
    assert roundtrip(Inceptionn(), x).tolist() == [1.5, -0.5, 2.0**-10, 0.0, -123 / 4096]


@every_bound
def test_no_entry_is_off_by_more_than_the_bound(bound: float) -> None:
    """Its logarithm is to base 2: what is dropped is below the bound, not a thousand times more."""
    x = magnitudes()
    error = (roundtrip(Inceptionn(bound=bound), x) - x).abs()
    assert (error <= bound).all()
    assert torch.equal(error[x.abs() >= 1], torch.zeros(int((x.abs() >= 1).sum())))


@every_bound
def test_the_leading_one_is_kept(bound: float) -> None:
    """Small entries keep their size, instead of all becoming one number."""
    x = magnitudes()
    out = roundtrip(Inceptionn(bound=bound), x)
    kept = x.abs() >= bound
    assert (out[kept].sign() == x[kept].sign()).all()
    ratio = out[kept] / x[kept]
    assert (ratio > 0.5).all()
    assert (ratio < 1.5).all()


def test_small_entries_decode_to_different_numbers() -> None:
    x = torch.linspace(0.00098, 0.0156, 50)
    out = roundtrip(Inceptionn(), x)
    assert out.unique().numel() > 40
    assert ((out - x).abs() <= 2.0**-13).all()


@every_bound
def test_what_is_dropped_is_below_the_bound(bound: float) -> None:
    x = magnitudes()
    out = roundtrip(Inceptionn(bound=bound), x)
    assert torch.equal(out[x.abs() < bound / 2], torch.zeros(int((x.abs() < bound / 2).sum())))


def test_bits_on_the_wire() -> None:
    assert bits_per_entry(Inceptionn(), torch.zeros(1_000_000)) == pytest.approx(2, rel=1e-3)
    for size, bits in ((2.0**-8, 10), (0.5, 18), (2.0, 34)):
        x = torch.full((1_000_000,), size)
        assert bits_per_entry(Inceptionn(), x) == pytest.approx(bits, rel=1e-3)
    assert 4 < bits_per_entry(Inceptionn(), normal(1_000_000) * 2.0**-10) < 6


def test_tags_take_no_byte_too_many() -> None:
    assert [Inceptionn().encode(torch.zeros(n)).parts[0].numel() for n in (4, 5, 8)] == [1, 2, 2]


def test_it_may_not_go_with_a_residual() -> None:
    assert not Inceptionn().traits().contraction
    assert "sends nothing" in Inceptionn().traits().why_not
    assert roundtrip(Inceptionn(), torch.full((10,), 1e-5)).count_nonzero() == 0


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_may_send_messages_of_different_lengths(size: int) -> None:
    ranks = Ranks("inceptionn", "none", "gather", (100,), size=size)
    grads = [torch.full((100,), 2.0 ** (rank - 3)) for rank in range(size)]
    torch.testing.assert_close(ranks.step(*grads), sum(grads) / size)


@pytest.mark.parametrize("numel", [0, 1, 7])
def test_zeros_and_small_sizes(numel: int) -> None:
    assert torch.equal(roundtrip(Inceptionn(), torch.zeros(numel)), torch.zeros(numel))
    assert roundtrip(Inceptionn(), normal(numel)).isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_stay_where_they_are(bad: float) -> None:
    ranks = Ranks("inceptionn", "none", "gather", (60,), size=3)
    out = ranks.step(normal(60), with_entry(normal(60), 7, bad), normal(60))
    assert not out[7].isfinite()
    assert with_entry(out, 7, 0.0).isfinite().all()


def change(parts: Parts, place: int, change: int) -> Parts:
    """The parts with one of them longer or shorter."""
    part = parts[place]
    other = part[:change] if change < 0 else torch.cat([part, part[:change]])
    return (*parts[:place], other, *parts[place + 1 :])


@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("by", [-1, 1])
def test_lengths_that_do_not_match_the_tags_are_refused(place: int, by: int) -> None:
    codec, x = Inceptionn(), magnitudes()
    layout = codec.layout(x.numel())
    packed = pack([change(codec.encode(x).parts, place, by)], [layout])
    with pytest.raises(WireError, match=f"have the tag {place}"):
        unpack(packed, [layout])


@settings(deadline=None)
@given(noise=st.binary(min_size=3, max_size=3), counts=st.tuples(*[st.integers(0, 4)] * 3))
def test_hostile_tags_are_refused_or_harmless(noise: bytes, counts: tuple[int, int, int]) -> None:
    codec, layout = Inceptionn(), Inceptionn().layout(10)
    codes = [
        torch.ones(n, dtype=dtype)
        for n, dtype in zip(counts, (torch.int8, torch.int16, torch.float32), strict=True)
    ]
    parts = (torch.tensor(list(noise), dtype=torch.uint8), *codes)
    try:
        [decoded] = unpack(pack([parts], [layout]), [layout])
    except WireError:
        return
    out = torch.zeros(10)
    codec.decode_add(out, [decoded], 1.0, EncodeContext((out.numel(),)))
    assert out.count_nonzero() == sum(counts)


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    x = eighths(1003) * 2.0 ** -(torch.arange(1003) % 15)
    assert wire_hash(Inceptionn(), x) == "1d68d274"  # type: ignore[arg-type]
    assert wire_hash(Inceptionn(bound=0.01), x) == "aa6a2c4b"  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", [0.0, -0.1, 1e-5, 0.6, 1, float("nan"), float("inf"), "0.1"])
def test_bound_out_of_range(bound: float) -> None:
    message = r"^inceptionn: bound must be in \[2\^-14, 0.5\], got "
    with pytest.raises(ConfigError, match=message):
        Inceptionn(bound=bound)
