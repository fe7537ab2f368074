"""QSGD: exact on average, and no noisier than its bound."""

from collections.abc import Callable
from typing import Literal

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

from gradwire.compressors.qsgd import QSGD
from gradwire.errors import ConfigError
from gradwire.types import EncodeContext

every_bits = pytest.mark.parametrize("bits", range(2, 9))
both_norms = pytest.mark.parametrize("norm", ["max", "l2"])
Norm = Literal["max", "l2"]


def draws(codec: QSGD, x: Tensor, count: int) -> Tensor:
    """Returns decoded independent messages of `x`, one per row."""
    return torch.stack(
        [roundtrip(codec, x, EncodeContext((x.numel(),), step=s)) for s in range(count)]
    )


def spiked(numel: int) -> Tensor:
    """One large entry in each bucket and small ones around it: the noisiest case."""
    return torch.where(torch.arange(numel) % 64 == 3, 1.0, 0.03)


def ideal_bits(codec: QSGD, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return codec.bits + 32 / codec.bucket


def test_entries_on_a_level_stay_there(backend: str) -> None:
    """Three bits: multiples of a third of the largest magnitude, bucket by bucket."""
    x = torch.tensor([3.0, -1.0, 2.0, 0.0, -0.75, 0.25])
    assert roundtrip(QSGD(bits=3, bucket=4), x).tolist() == [3.0, -1.0, 2.0, 0.0, -0.75, 0.25]


def test_entries_between_levels_go_to_a_neighbour() -> None:
    x = torch.tensor([3.0, 1.25])
    decoded = draws(QSGD(bits=3, bucket=2), x, 400)[:, 1]
    assert set(decoded.tolist()) == {1.0, 2.0}
    assert decoded.mean() == pytest.approx(1.25, abs=4 * 0.433 / 20)


@every_bits
@both_norms
def test_unbiased(bits: int, norm: Norm) -> None:
    x = torch.cat([normal(128), spiked(128)])
    decoded = draws(QSGD(bits=bits, bucket=64, norm=norm), x, 400).double()
    error = (decoded.mean(0) - x.double()).abs()
    scale = x.double().view(-1, 64).norm(dim=1, p=torch.inf if norm == "max" else 2)
    unit = (scale / (2 ** (bits - 1) - 1)).repeat_interleave(64)
    chance = (x.double().abs() / unit) % 1
    noise = unit * (chance * (1 - chance) / 400).sqrt()
    # A rare step up is no normal noise: four of them too many can be chance.
    assert (error <= 5 * noise + 4 * unit / 400).all()
    total = decoded.sum(1)
    assert abs(total.mean() - x.double().sum()) <= 4 * total.std() / 20 + 1e-4


@every_bits
@both_norms
@pytest.mark.parametrize("make", [normal, spiked, torch.ones])
def test_variance_is_within_its_bound(bits: int, norm: Norm, make: Callable[[int], Tensor]) -> None:
    codec, x = QSGD(bits=bits, bucket=64, norm=norm), make(640)
    errors = (draws(codec, x, 100) - x).double().square().sum(1) / x.double().square().sum()
    assert errors.mean() <= codec.variance() + 4 * errors.std() / 10 + 1e-9


@every_bits
@both_norms
def test_every_level_can_be_reached(backend: str, bits: int, norm: Norm) -> None:
    """Buckets of two, of norm 1, whose first entries are a ramp."""
    levels = 2 ** (bits - 1) - 1
    ramp = torch.linspace(-1, 1, 4097)
    other = torch.ones(4097) if norm == "max" else (1 - ramp.square()).sqrt()
    decoded = roundtrip(QSGD(bits=bits, bucket=2, norm=norm), torch.stack([ramp, other], dim=1))
    reached = (decoded[:, 0] * levels).round()
    assert reached.unique().tolist() == list(range(-levels, levels + 1))


@every_bits
def test_the_largest_entry_of_a_bucket_is_exact(backend: str, bits: int) -> None:
    x = normal(1280)
    decoded = roundtrip(QSGD(bits=bits, bucket=128), x)
    for entries, out in zip(x.split(128), decoded.split(128), strict=True):
        place = entries.abs().argmax()
        torch.testing.assert_close(out[place], entries[place], rtol=3e-7, atol=0)


def test_zeros_stay_zeros(backend: str) -> None:
    x = torch.zeros(300)
    x[200:] = normal(100)
    for norm in ("max", "l2"):
        decoded = roundtrip(QSGD(bits=4, bucket=100, norm=norm), x)
        assert torch.equal(decoded[:200], torch.zeros(200))
        assert decoded[200:].isfinite().all()


def test_error_does_not_grow_with_the_tensor() -> None:
    """One scale a bucket, not one a tensor."""
    codec = QSGD(bits=8, bucket=512, norm="l2")
    errors = [squared_error(normal(n), roundtrip(codec, normal(n))) for n in (1000, 1_000_000)]
    assert errors[1] < 1.1 * errors[0] < codec.variance()


@every_bits
def test_bits_on_the_wire(bits: int) -> None:
    assert bits_per_entry(QSGD(bits=bits), normal(1_000_000)) == pytest.approx(
        bits + 32 / 128, 0.01
    )
    assert bits_per_entry(QSGD(bits=4), normal(1_000_000)) <= 4.3


def test_ranks_round_independently_and_steps_too() -> None:
    codec, x = QSGD(bits=2), normal(1000)
    ctx = EncodeContext((1000,), world_size=2)
    first = roundtrip(codec, x, ctx)
    for other in (ctx._replace(rank=1), ctx._replace(step=1), ctx._replace(seed=1)):
        assert (roundtrip(codec, x, other) != first).float().mean() > 0.1


def test_the_mean_of_many_ranks_is_closer() -> None:
    x = normal(1000)
    one = Ranks("qsgd:bits=2", "none", "gather", (1000,), size=1).step(x)
    many = Ranks("qsgd:bits=2", "none", "gather", (1000,), size=16).step(*[x] * 16)
    assert squared_error(x, many) < 0.15 * squared_error(x, one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_has_the_type_of_the_gradient(dtype: torch.dtype) -> None:
    ranks = Ranks("qsgd", "none", "gather", (50,))
    assert ranks.step(*[normal(50).to(dtype)] * 2).dtype == dtype


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@both_norms
def test_non_finite_entries_break_their_bucket(
    backend: str, exchange_name: str, bad: float, norm: Norm
) -> None:
    ranks = Ranks(f"qsgd:bucket=10,norm={norm}", "none", exchange_name, (60,), size=3)
    out = ranks.step(normal(60), with_entry(normal(60), 7, bad), normal(60))
    assert not out[7].isfinite()
    assert out[10:].isfinite().all()


@both_norms
@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_the_size_of_a_gradient_does_not_matter(backend: str, norm: Norm, size: float) -> None:
    codec, x = QSGD(bits=8, bucket=64, norm=norm), normal(640)
    assert squared_error(x * size, roundtrip(codec, x * size)) < codec.variance()


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    """Scales are powers of two, so levels are exact and all backends round the same."""
    assert wire_hash(QSGD(bits=4), eighths(1024)) == "4a15ed8e"
    assert wire_hash(QSGD(bits=2), eighths(1000)) == "8143a6e1"
    assert wire_hash(QSGD(bits=7, bucket=200), eighths(1003)) == "c54c3b87"


@pytest.mark.parametrize("bits", [1, 0, -3, 9, 32])
def test_bits_out_of_range(bits: int) -> None:
    with pytest.raises(ConfigError, match=f"^qsgd: bits must be 2 to 8, got {bits}$"):
        QSGD(bits=bits)


@pytest.mark.parametrize("bucket", [0, -1])
def test_bucket_out_of_range(bucket: int) -> None:
    with pytest.raises(ConfigError, match=f"^qsgd: bucket must be at least 1, got {bucket}$"):
        QSGD(bucket=bucket)


def test_unknown_norm() -> None:
    with pytest.raises(ConfigError, match="qsgd: norm must be 'max' or 'l2', got 'l1'"):
        QSGD(norm="l1")  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"bits": 4.0}, {"bucket": 1.5}])
def test_settings_that_are_no_whole_numbers(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"qsgd: (bits|bucket)"):
        QSGD(**settings)  # type: ignore[arg-type]
