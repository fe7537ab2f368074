"""RedSync: between k and 2k of the largest entries, by a threshold."""

import pytest
import torch
from few_ranks import Ranks, eighths, normal, roundtrip, squared_error, wire_hash, with_entry
from torch import Tensor

from gradwire.compressors.redsync import RedSync
from gradwire.errors import ConfigError
from gradwire.types import EFInput, EncodeContext

SHAPES = {
    "normal": normal(20_000),
    "heavy": normal(20_000) ** 3,
    "shifted": normal(20_000) + 10,
    "huge": normal(20_000) * 1e37,
    "tiny": normal(20_000) * 1e-42,
}


def chosen(x: Tensor, ratio: float) -> Tensor:
    return RedSync(ratio=ratio).select(EFInput(x), EncodeContext((x.numel(),)))


def test_bisects_between_mean_and_largest() -> None:
    """Mean 4, largest 16: 10 passes one of eight, and one to two are asked for."""
    x = torch.tensor([16.0, 1.0, -8.0, 2.0, 3.0, 1.0, 0.0, 1.0])
    assert roundtrip(RedSync(ratio=1 / 8), x).tolist() == [16.0, *[0.0] * 7]
    # 2 to 4 are asked for: 10 passes one, and halfway down to the mean 7 passes two.
    assert roundtrip(RedSync(ratio=1 / 4), x).tolist() == [16.0, 0.0, -8.0, *[0.0] * 5]


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.05])
@pytest.mark.parametrize("name", SHAPES)
def test_sends_k_to_2k_of_the_largest(name: str, ratio: float) -> None:
    x = SHAPES[name]
    index = chosen(x, ratio)
    assert ratio * x.numel() <= index.numel() <= 2 * ratio * x.numel()
    rest = x.abs().index_fill(0, index, 0)
    assert x[index].abs().min() >= rest.max()


@pytest.mark.parametrize("ratio", [0.01, 0.05])
def test_error_is_at_most_what_an_even_spread_would_lose(ratio: float) -> None:
    for x in (*SHAPES.values(), torch.ones(1000), torch.arange(1000.0)):
        out = roundtrip(RedSync(ratio=ratio, values="fp32"), x)
        assert squared_error(x, out) <= 1 - ratio + 1e-6


def test_at_least_the_largest_is_sent() -> None:
    """No threshold between mean and largest passes more than the one."""
    x = with_entry(normal(1000), 7, 1e30)
    assert chosen(x, 0.1).tolist() == [7]
    assert chosen(with_entry(torch.zeros(1000), 7, -1e-45), 0.1).tolist() == [7]


def test_of_equal_magnitudes_at_most_twice_the_target() -> None:
    assert chosen(torch.full((1000,), -0.1), 0.01).tolist() == list(range(20))
    assert chosen(torch.ones(3), 1.0).tolist() == [0, 1, 2]


def test_all_negative_entries_are_no_exception() -> None:
    x = -normal(10_000).abs()
    assert torch.equal(chosen(x, 0.01), chosen(-x, 0.01))
    assert 100 <= chosen(x, 0.01).numel() <= 200


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_zeros_send_nothing(numel: int) -> None:
    assert chosen(torch.zeros(numel), 0.1).tolist() == []
    assert torch.equal(roundtrip(RedSync(ratio=0.1), torch.zeros(numel)), torch.zeros(numel))


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_are_selected(backend: str, exchange_name: str, bad: float) -> None:
    ranks = Ranks("redsync:ratio=0.1", "residual", exchange_name, (100,), size=3)
    out = ranks.step(normal(100), with_entry(normal(100), 7, bad), normal(100))
    assert not out[7].isfinite()
    assert out[torch.arange(100) != 7].isfinite().all()


def test_nothing_but_non_finite_entries() -> None:
    assert not roundtrip(RedSync(ratio=0.1), torch.full((100,), torch.nan))[:20].isfinite().any()


def test_ranks_may_send_messages_of_different_length() -> None:
    ranks = Ranks("redsync:ratio=0.25,values=fp32", "none", "gather", (8,))
    one, two = torch.ones(8), with_entry(torch.zeros(8), 3, 4.0)
    assert ranks.step(one, two).tolist() == [0.5, 0.5, 0.5, 2.5, 0.0, 0.0, 0.0, 0.0]


def test_bits_on_the_wire() -> None:
    x = normal(1_000_000)
    index = chosen(x, 0.01)
    # 16 bits of value and less than 9 of position.
    assert 8 * RedSync(ratio=0.01).encode(x).nbytes / index.numel() <= 25


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(RedSync(ratio=0.1), eighths(1000)) == "b0328001"
    assert wire_hash(RedSync(ratio=0.01, values="fp32"), eighths(4097)) == "0979bae8"


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan")])
def test_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(ConfigError, match=rf"^redsync: ratio must be in \(0, 1\], got {ratio}$"):
        RedSync(ratio=ratio)


def test_unknown_format_of_values() -> None:
    with pytest.raises(ConfigError, match=r"^redsync: values must be one of .*, got 'fp8'$"):
        RedSync(ratio=0.1, values="fp8")  # type: ignore[arg-type]
