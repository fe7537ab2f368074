"""Adaptive quantisation: the largest of either sign, and one mean each."""

import pytest
import torch
from few_ranks import (
    Ranks,
    bits_per_entry,
    normal,
    roundtrip,
    selection_bits,
    squared_error,
    wire_hash,
    with_entry,
)
from torch import Tensor

from gradwire.compressors.adaq import AdaQ
from gradwire.errors import ConfigError, WireError
from gradwire.wire.indices import unpack_index


def distinct(numel: int) -> Tensor:
    """Multiples of 1/8 shuffled, all different (numel below 1009)."""
    return (torch.arange(numel) * 37 % 1009 - 504) / 8


def ideal_bits(codec: AdaQ, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    count = codec.count(x.numel())
    return (selection_bits(x.numel(), count) + count + 64) / x.numel()


def test_by_hand() -> None:
    """Half of eight: two of five positives, since round(4 * 3/8) = 2 are for the negatives."""
    x = torch.tensor([1.0, -4.0, 2.0, 3.0, -8.0, 0.5, -1.0, 5.0])
    index, signs, means = AdaQ(ratio=0.5).encode(x).parts
    assert unpack_index(index, 8, 4).tolist() == [1, 3, 4, 7]
    assert signs.tolist() == [0b0101]
    assert means.tolist() == [4.0, -6.0]
    assert roundtrip(AdaQ(ratio=0.5), x).tolist() == [0, -6, 0, 4, -6, 0, 0, 4]


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 1.0])
def test_keeps_the_largest_of_each_sign(ratio: float) -> None:
    x = normal(1000) + 0.7
    out = roundtrip(AdaQ(ratio=ratio), x)
    for sign in (1, -1):
        own, kept = sign * x > 0, sign * out > 0
        assert kept.sum() == pytest.approx(ratio * own.sum(), abs=1)
        assert (own | ~kept).all()
        if not kept[own].all():
            assert (sign * x)[kept].min() >= (sign * x)[own & ~kept].max()
        torch.testing.assert_close(out[kept], x[kept].mean().expand(int(kept.sum())))
    assert out.count_nonzero() == AdaQ(ratio=ratio).count(1000)


def test_the_rarer_sign_has_its_entry() -> None:
    """However few they are, negatives are not crowded out (nor positives)."""
    x = torch.ones(1000)
    x[77] = -50
    for sign in (1, -1):
        assert roundtrip(AdaQ(ratio=0.002), sign * x)[77] == sign * -50


def test_error_is_the_norm_minus_the_decoded_norm() -> None:
    """|x|² - |decoded|², and less than |x|² for every x."""
    spike = with_entry(torch.zeros(1000), 5, -3.0)
    for x in (normal(1000), normal(1000).abs(), spike, spike + 1e-3, torch.ones(1000)):
        for ratio in (0.001, 0.1, 1.0):
            out = roundtrip(AdaQ(ratio=ratio), x).double()
            share = float(out.square().sum() / x.double().square().sum())
            assert squared_error(x, out) == pytest.approx(1 - share, abs=1e-5)
            assert share >= 1 / (1000 * AdaQ(ratio=ratio).count(1000)) - 1e-9


def test_exact_on_two_values() -> None:
    x = torch.where(normal(1000) > 0.3, 2.5, -0.75)
    assert torch.equal(roundtrip(AdaQ(ratio=1.0), x), x)


def test_sparse_gradients() -> None:
    """Fewer entries than the ratio: zeros in the message lower only the lighter mean."""
    x = with_entry(with_entry(torch.zeros(1000), 3, 8.0), 500, 8.0)
    assert torch.equal(roundtrip(AdaQ(ratio=0.1), x), x)
    assert torch.equal(roundtrip(AdaQ(ratio=0.1), -x), -x)
    x[700] = -0.98
    out = roundtrip(AdaQ(ratio=0.1), x)
    assert out[3] == out[500] == 8
    assert out[700] == pytest.approx(-0.01)


def test_what_was_not_sent_comes_later() -> None:
    ranks = Ranks("adaq:ratio=0.5", "residual", "gather", (4,), size=1)
    assert ranks.step(torch.tensor([3.0, 1.0, -2.0, -1.0])).tolist() == [3.0, 0.0, -2.0, 0.0]
    assert ranks.residual().tolist() == [0.0, 1.0, 0.0, -1.0]
    assert ranks.step(torch.zeros(4)).tolist() == [0.0, 1.0, 0.0, -1.0]


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 129])
@pytest.mark.parametrize("value", [0.0, -0.0, 2.0, -2.0])
def test_constants_and_sizes(numel: int, value: float) -> None:
    x = torch.full((numel,), value)
    out = roundtrip(AdaQ(ratio=0.3), x)
    assert out.count_nonzero() == (AdaQ(ratio=0.3).count(numel) if value else 0)
    assert out.unique().numel() <= 2


@pytest.mark.parametrize("size", [1e-38, 1e38])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    x = torch.where(normal(1000) > 0, size, -size)
    torch.testing.assert_close(roundtrip(AdaQ(ratio=1.0), x), x)


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("others", [1, -1])
def test_non_finite_entries_break_their_sign(exchange_name: str, bad: float, others: int) -> None:
    ranks = Ranks("adaq:ratio=0.1", "none", exchange_name, (100,), size=3)
    x = others * normal(100).abs()
    out = ranks.step(x, with_entry(x, 7, bad), x)
    assert not out[7].isfinite()
    assert out.isfinite().any()


def test_bits_on_the_wire() -> None:
    """Position and sign of one in a hundred: entropy 8.08 + 1 bits each."""
    codec = AdaQ(ratio=0.01)
    bits = 1e6 * bits_per_entry(codec, normal(1_000_000)) / codec.count(1_000_000)
    assert bits == pytest.approx(9.58, abs=0.02)


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_bits_are_near_the_entropy(ratio: float) -> None:
    codec, x = AdaQ(ratio=ratio), normal(1_000_000)
    assert codec.count(x.numel()) == round(ratio * x.numel())
    assert bits_per_entry(codec, x) <= 1.4 * ideal_bits(codec, x)


def test_a_message_that_points_outside_is_refused() -> None:
    codec = AdaQ(ratio=0.5)
    parts = codec.encode(normal(10)).parts
    check = codec.layout(10).check
    assert check is not None
    check(parts)
    with pytest.raises(WireError):
        check((torch.full_like(parts[0], 255), *parts[1:]))


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(AdaQ(ratio=0.1), distinct(1000)) == "ac4f459d"
    assert wire_hash(AdaQ(ratio=0.01), distinct(777)) == "fbe729a6"


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan"), "0.1"])
def test_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(ConfigError, match=rf"^adaq: ratio must be in \(0, 1\], got {ratio!r}$"):
        AdaQ(ratio=ratio)
