"""TernGrad: three values an entry, exact on average."""

import math
from collections.abc import Callable

import pytest
import torch
from few_ranks import Ranks, bits_per_entry, eighths, normal, roundtrip, wire_hash, with_entry
from torch import Tensor

from gradwire.compressors.terngrad import TernGrad
from gradwire.errors import ConfigError, WireError
from gradwire.types import EncodeContext
from gradwire.wire.layout import pack, unpack

both = pytest.mark.parametrize("clip", [0, 2.5])


def draws(codec: TernGrad, x: Tensor, count: int) -> Tensor:
    return torch.stack(
        [roundtrip(codec, x, EncodeContext((x.numel(),), step=s)) for s in range(count)]
    ).double()


def worst(numel: int) -> Tensor:
    """The tensor that meets the variance bound: one entry of 1, the others 1/(1 + √n)."""
    return with_entry(torch.full((numel,), 1 / (1 + numel**0.5)), 0, 1.0)


def ideal_bits(codec: TernGrad, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return math.log2(3)


def test_entries_of_the_largest_magnitude_and_zeros_are_exact() -> None:
    x = torch.tensor([2.0, -2.0, 0.0, 0.0, 2.0, -2.0, 0.0])
    packed, scale = TernGrad().encode(x).parts
    assert packed.tolist() == [2 + 0 * 3 + 1 * 9 + 1 * 27 + 2 * 81, 0 + 3 * 1 + 9 + 27 + 81]
    assert scale.tolist() == [2.0]
    assert torch.equal(roundtrip(TernGrad(), x), x)


def test_an_entry_is_sent_as_often_as_it_is_large() -> None:
    decoded = draws(TernGrad(), torch.tensor([4.0, -1.0]), 400)[:, 1]
    assert set(decoded.tolist()) == {0.0, -4.0}
    assert decoded.mean() == pytest.approx(-1.0, abs=4 * 3**0.5 / 20)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_unbiased_without_clipping_whatever_the_mean(shift: float) -> None:
    x = normal(500) + shift
    decoded = draws(TernGrad(), x, 1000)
    directions = torch.stack([x, torch.ones(500), *normal(8, 500, seed=1)], dim=1).double()
    sums = decoded @ directions
    error = (sums.mean(0) - x.double() @ directions).abs()
    assert (error <= 4 * sums.std(0) / 1000**0.5).all()


@both
@pytest.mark.parametrize("make", [normal, worst, torch.ones, lambda n: normal(n) ** 5])
def test_variance_is_within_its_bound(clip: float, make: Callable[[int], Tensor]) -> None:
    codec, x = TernGrad(clip=clip), make(400)
    errors = (draws(codec, x, 200) - x).square().sum(1) / x.double().square().sum()
    assert errors.mean() <= codec.variance(400) + 4 * errors.std() / 200**0.5 + 1e-9


def test_the_bound_is_tight() -> None:
    errors = (draws(TernGrad(), worst(400), 400) - worst(400)).square().sum(1)
    measured = errors.mean() / worst(400).double().square().sum()
    assert measured == pytest.approx(TernGrad().variance(400), rel=0.05)


@pytest.mark.parametrize("value", [3.0, -0.25, 1e-30, 1e30])
@pytest.mark.parametrize("numel", [1, 7, 1000])
@both
def test_constant_and_one_element_tensors_are_updated(
    clip: float, numel: int, value: float
) -> None:
    """A spread of zero must not cut everything to zero."""
    x = torch.full((numel,), value)
    torch.testing.assert_close(roundtrip(TernGrad(clip=clip), x), x, rtol=1e-6, atol=0)


def test_clipping_cuts_at_multiples_of_the_root_mean_square() -> None:
    x = with_entry(torch.ones(999), 5, 100.0)
    _, scale = TernGrad(clip=2.5).encode(x).parts
    assert float(scale) == pytest.approx(2.5 * (10998 / 999) ** 0.5)
    assert roundtrip(TernGrad(clip=2.5), x)[5] == scale


def test_it_may_not_go_with_a_residual() -> None:
    for clip in (0, 2.5):
        traits = TernGrad(clip=clip).traits()
        assert not traits.contraction
        assert "not below 1" in traits.why_not
        assert traits.unbiased == (clip == 0)


def test_bits_on_the_wire() -> None:
    assert bits_per_entry(TernGrad(), normal(1_000_000)) == pytest.approx(1.6, rel=1e-3)


def test_ranks_and_steps_draw_for_themselves() -> None:
    x, ctx = normal(1000), EncodeContext((1000,), world_size=2)
    first = roundtrip(TernGrad(), x, ctx)
    for other in (ctx._replace(rank=1), ctx._replace(step=1), ctx._replace(seed=1)):
        assert (roundtrip(TernGrad(), x, other) != first).float().mean() > 0.1


@both
@pytest.mark.parametrize("numel", [0, 1, 7])
def test_zeros_and_small_sizes(clip: float, numel: int) -> None:
    codec = TernGrad(clip=clip)
    assert torch.equal(roundtrip(codec, torch.zeros(numel)), torch.zeros(numel))
    assert roundtrip(codec, normal(numel)).isfinite().all()


@both
@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_appear(clip: float, exchange_name: str, bad: float) -> None:
    ranks = Ranks(f"terngrad:clip={clip}", "none", exchange_name, (60,), size=3)
    out = ranks.step(normal(60), with_entry(normal(60), 7, bad), normal(60))
    assert not out[7].isfinite()


@both
def test_the_mean_has_the_type_of_the_gradient(clip: float) -> None:
    ranks = Ranks(f"terngrad:clip={clip}", "none", "gather", (50,))
    assert ranks.step(*[normal(50).bfloat16()] * 2).dtype == torch.bfloat16


def test_bytes_that_are_no_trits_are_refused() -> None:
    codec = TernGrad()
    packed = pack([codec.encode(normal(50)).parts], [codec.layout(50)])
    packed[3] = 250
    with pytest.raises(WireError, match="no five trits"):
        unpack(packed, [codec.layout(50)])


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(TernGrad(), eighths(1003)) == "7f30f9c9"


@pytest.mark.parametrize("clip", [-1, 0.5, float("nan"), float("inf"), "2", True])
def test_clip_out_of_range(clip: float) -> None:
    with pytest.raises(ConfigError, match=r"^terngrad: clip must be 0 or at least 1, got "):
        TernGrad(clip=clip)
