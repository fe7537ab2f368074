"""Gaussian-k: a threshold from mean and spread, moved until it fits."""

import pytest
import torch
from few_ranks import Ranks, eighths, normal, roundtrip, squared_error, wire_hash, with_entry
from torch import Tensor

from gradwire.compressors.gaussiank import GaussianK
from gradwire.errors import ConfigError
from gradwire.types import EFInput, EncodeContext


def chosen(x: Tensor, codec: GaussianK) -> Tensor:
    return codec.select(EFInput(x), EncodeContext((x.numel(),)))


def test_threshold_by_hand() -> None:
    """Mean 0 and spread 2: a fifth of normal entries is beyond 1.28 spreads, 2.56."""
    x = torch.tensor([3.0, -3.0, 1.0, -1.0, 0.0, 0.0, 2.5, -2.5, 2.42, -2.42])
    x = x * 2 / x.std(correction=0)
    assert roundtrip(GaussianK(ratio=0.2, rounds=0), x).nonzero().view(-1).tolist() == [0, 1]


def test_the_mean_counts_whatever_its_sign() -> None:
    x = normal(10_000) + 100
    assert torch.equal(chosen(x, GaussianK(ratio=0.1)), chosen(-x, GaussianK(ratio=0.1)))


@pytest.mark.parametrize("rounds", [0, 4])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_exact_for_normal_entries(ratio: float, rounds: int) -> None:
    found = chosen(normal(200_000), GaussianK(ratio=ratio, rounds=rounds)).numel()
    assert found == pytest.approx(ratio * 200_000, rel=0.15)


def test_too_high_a_threshold_is_halved() -> None:
    """Uniform entries never reach 2.58 spreads; half of that is about 1.29 of at most 1.73."""
    x = torch.linspace(-1, 1, 10_001)
    aim = 0.01 * 10_001
    assert chosen(x, GaussianK(ratio=0.01, rounds=0)).numel() == 2
    assert 2 / 3 * aim <= chosen(x, GaussianK(ratio=0.01, rounds=20)).numel() <= 2 * aim


def test_too_low_a_threshold_is_raised() -> None:
    """Laplace tails are heavier, so at first more than 4/3 of the target are beyond."""
    size = -torch.log1p(-torch.rand(100_000, generator=torch.Generator().manual_seed(0)))
    x = size * normal(100_000, seed=1).sign()
    assert chosen(x, GaussianK(ratio=0.001, rounds=0)).numel() == 200
    assert chosen(x, GaussianK(ratio=0.001, rounds=1)).numel() < 150


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_at_least_one_and_at_most_twice_the_target(rounds: int) -> None:
    codec = GaussianK(ratio=0.01, rounds=rounds)
    for x in (normal(10_000) ** 5, normal(10_000) + 10, torch.ones(10_000), eighths(10_000)):
        index = chosen(x, codec)
        assert 1 <= index.numel() <= 200
        assert x[index].abs().min() >= x.abs().index_fill(0, index, 0).max()
        assert squared_error(x, roundtrip(codec, x)) < 1


@pytest.mark.parametrize("scale", [1e37, 1e-35])
def test_scale_does_not_matter(scale: float) -> None:
    x = normal(10_000)
    one, two = (chosen(x * s, GaussianK(ratio=0.01)).numel() for s in (1.0, scale))
    assert abs(one - two) <= 1


def test_one_entry_is_sent() -> None:
    assert chosen(torch.tensor([-0.5]), GaussianK(ratio=0.01)).tolist() == [0]
    assert chosen(with_entry(torch.zeros(100), 9, 1e-45), GaussianK(ratio=0.01)).tolist() == [9]
    assert chosen(with_entry(normal(100), 9, 1e30), GaussianK(ratio=0.01)).tolist() == [9]


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_zeros_send_nothing(numel: int) -> None:
    assert chosen(torch.zeros(numel), GaussianK(ratio=0.1)).tolist() == []
    assert torch.equal(roundtrip(GaussianK(ratio=0.1), torch.zeros(numel)), torch.zeros(numel))


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_are_selected(backend: str, exchange_name: str, bad: float) -> None:
    ranks = Ranks("gaussiank:ratio=0.1", "residual", exchange_name, (100,), size=3)
    out = ranks.step(normal(100), with_entry(normal(100), 7, bad), normal(100))
    assert not out[7].isfinite()
    assert out[torch.arange(100) != 7].isfinite().all()


def test_bits_on_the_wire() -> None:
    x, codec = normal(1_000_000), GaussianK(ratio=0.01)
    # 16 bits of value and less than 9 of position.
    assert 8 * codec.encode(x).nbytes / chosen(x, codec).numel() <= 25


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(GaussianK(ratio=0.1), eighths(1000)) == "57c7ef19"
    assert wire_hash(GaussianK(ratio=0.2, rounds=0, values="fp32"), eighths(4097)) == "926c35cc"


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan")])
def test_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(ConfigError, match=rf"^gaussiank: ratio must be in \(0, 1\], got {ratio}$"):
        GaussianK(ratio=ratio)


def test_bad_rounds_and_format() -> None:
    with pytest.raises(ConfigError, match=r"^gaussiank: rounds must be 0 to 100, got -1$"):
        GaussianK(ratio=0.1, rounds=-1)
    with pytest.raises(ConfigError, match=r"^gaussiank: values must be one of .*, got 'fp8'$"):
        GaussianK(ratio=0.1, values="fp8")  # type: ignore[arg-type]
