"""NUQSGD: unbiased, levels that halve towards zero, and a variance within its bound."""

from collections.abc import Callable

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

from gradwire.compressors.nuqsgd import NUQSGD
from gradwire.compressors.qsgd import QSGD
from gradwire.errors import ConfigError
from gradwire.types import EncodeContext

every_bits = pytest.mark.parametrize("bits", range(2, 9))


def ideal_bits(codec: NUQSGD, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return codec.bits + 32 / codec.bucket


def draws(codec: NUQSGD | QSGD, x: Tensor, count: int) -> Tensor:
    """Returns decoded independent messages of `x`, one per row."""
    return torch.stack(
        [roundtrip(codec, x, EncodeContext((x.numel(),), step=s)) for s in range(count)]
    )


def spiked(numel: int) -> Tensor:
    """Returns one large entry in each bucket of 64 and small ones around it."""
    return torch.where(torch.arange(numel) % 64 == 3, 1.0, 0.03)


def test_entries_on_a_level_are_exact(backend: str) -> None:
    """Three bits: 0, 1/4, 1/2 and 1 of the norm, which is 8 here: 4² + 4² + 4² + 4 · 2² = 8²."""
    x = torch.tensor([4.0, -4.0, 4.0, 2.0, -2.0, 2.0, 2.0, 0.0, -3.0])
    assert roundtrip(NUQSGD(bits=3, bucket=8), x).tolist() == x.tolist()


def test_entries_between_levels_go_to_one_of_the_two_nearest() -> None:
    """Of norm 5, 3 is between 2.5 and 5 and goes up in one of five draws."""
    decoded = draws(NUQSGD(bits=3, bucket=2), torch.tensor([3.0, 4.0]), 400)
    assert set(decoded[:, 0].tolist()) == set(decoded[:, 1].tolist()) == {2.5, 5.0}
    assert decoded[:, 0].mean() == pytest.approx(3, abs=4 * 2.5 * 0.4 / 20)
    assert decoded[:, 1].mean() == pytest.approx(4, abs=4 * 2.5 * 0.49 / 20)


@every_bits
def test_all_levels_are_powers_of_two_and_all_are_used(bits: int) -> None:
    """Buckets of two, whose first entries are all shares of the norm from 2^-s / 2 to 1."""
    codec, s = NUQSGD(bits=bits, bucket=2), 2 ** (bits - 1) - 2
    share = 2.0 ** torch.linspace(-s - 1, 0, 8193, dtype=torch.float64)
    payload = codec.encode(torch.stack([share, (1 - share.square()).sqrt()], dim=1))
    reached = codec.decode(payload)[:, 0] / payload.parts[1]
    assert reached.unique().tolist() == [0.0, *(2.0**-e for e in range(s, -1, -1))]


@every_bits
def test_unbiased(bits: int) -> None:
    x = torch.cat([normal(128), spiked(128)])
    decoded = draws(NUQSGD(bits=bits, bucket=64), x, 400).double()
    norm = x.double().view(-1, 64).norm(dim=1).repeat_interleave(64)
    # The gap between the levels around an entry is at most its size, or the lowest level.
    gap = torch.maximum(x.double().abs(), norm * 2.0 ** (2 - 2 ** (bits - 1)))
    noise = gap / 2 / 400**0.5
    assert ((decoded.mean(0) - x.double()).abs() <= 5 * noise).all()
    total = decoded.sum(1)
    assert abs(total.mean() - x.double().sum()) <= 4 * total.std() / 20 + 1e-4


@every_bits
@pytest.mark.parametrize("bucket", [8, 640])
@pytest.mark.parametrize("make", [normal, spiked, torch.ones])
def test_variance_is_within_its_bound(
    bits: int, bucket: int, make: Callable[[int], Tensor]
) -> None:
    codec, x = NUQSGD(bits=bits, bucket=bucket), make(640)
    errors = (draws(codec, x, 100) - x).double().square().sum(1) / x.double().square().sum()
    assert errors.mean() <= codec.variance() + 4 * errors.std() / 10 + 1e-9


@pytest.mark.parametrize("bucket", [64, 4096])
def test_the_bound_is_tight(bucket: int) -> None:
    """Equal entries have the share 1/√d: with the lowest level at 1, the variance is √d - 1."""
    codec, x = NUQSGD(bits=2, bucket=bucket), torch.ones(16 * bucket)
    assert codec.variance() == bucket**0.5 - 1
    error = sum(squared_error(x, row) for row in draws(codec, x, 20)) / 20
    assert error == pytest.approx(codec.variance(), rel=0.2)


def test_less_noise_than_uniform_levels_of_the_same_norm() -> None:
    """The claim of the paper, for as many bits."""
    x = normal(64 * 1024)
    uniform, nonuniform = QSGD(bits=4, bucket=1024, norm="l2"), NUQSGD(bits=4, bucket=1024)
    assert squared_error(x, roundtrip(nonuniform, x)) < 0.1 * squared_error(
        x, roundtrip(uniform, x)
    )
    assert nonuniform.variance() < uniform.variance()


def test_a_contraction_only_where_the_bound_is_below_one() -> None:
    assert NUQSGD(bits=4, bucket=1024).traits().contraction
    traits = NUQSGD(bits=3, bucket=1024).traits()
    assert traits.unbiased
    assert not traits.contraction
    assert "its variance bound with bits=3, bucket=1024 is 7, not below 1" in traits.why_not


def test_ranks_and_steps_round_independently() -> None:
    codec, x = NUQSGD(), normal(1000)
    ctx = EncodeContext((1000,), world_size=2)
    first = roundtrip(codec, x, ctx)
    for other in (ctx._replace(rank=1), ctx._replace(step=1), ctx._replace(seed=1)):
        assert (roundtrip(codec, x, other) != first).float().mean() > 0.1


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_break_their_bucket(exchange_name: str, bad: float) -> None:
    ranks = Ranks("nuqsgd:bucket=10", "none", exchange_name, (60,), size=3)
    out = ranks.step(normal(60), with_entry(normal(60), 7, bad), normal(60))
    assert not out[7].isfinite()
    assert out[10:].isfinite().all()


@every_bits
@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_the_size_of_a_gradient_does_not_matter(bits: int, size: float) -> None:
    codec, x = NUQSGD(bits=bits, bucket=64), normal(640)
    torch.testing.assert_close(roundtrip(codec, x * size) / size, roundtrip(codec, x))


def test_zeros_stay_zeros() -> None:
    x = torch.cat([torch.zeros(200), normal(100)])
    decoded = roundtrip(NUQSGD(bucket=100), x)
    assert torch.equal(decoded[:200], torch.zeros(200))
    assert decoded[200:].isfinite().all()


@every_bits
def test_bits_on_the_wire(bits: int) -> None:
    expected = pytest.approx(bits + 32 / 1024, rel=1e-3)
    assert bits_per_entry(NUQSGD(bits=bits), normal(1_000_000)) == expected


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    """Sums of squares of eighths are exact, so norms are the same everywhere."""
    assert wire_hash(NUQSGD(), eighths(1024)) == "aa4497ab"
    assert wire_hash(NUQSGD(bits=3, bucket=100), eighths(1003)) == "3e6e552e"


@pytest.mark.parametrize("bits", [1, 0, -3, 9, 32])
def test_bits_out_of_range(bits: int) -> None:
    with pytest.raises(ConfigError, match=f"^nuqsgd: bits must be 2 to 8, got {bits}$"):
        NUQSGD(bits=bits)


@pytest.mark.parametrize("bucket", [0, -1])
def test_bucket_out_of_range(bucket: int) -> None:
    with pytest.raises(ConfigError, match=f"^nuqsgd: bucket must be at least 1, got {bucket}$"):
        NUQSGD(bucket=bucket)


@pytest.mark.parametrize("settings", [{"bits": 4.0}, {"bucket": 1.5}])
def test_settings_that_are_no_integers(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"nuqsgd: (bits|bucket) must be a whole number"):
        NUQSGD(**settings)  # type: ignore[arg-type]
