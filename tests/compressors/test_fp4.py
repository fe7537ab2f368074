"""4-bit floating point: signs and powers of two within each block."""

import pytest
import torch
from few_ranks import Ranks, eighths, normal, roundtrip, squared_error, wire_hash, with_entry
from torch import Tensor

from gradwire.compressors.fp4 import Fp4
from gradwire.errors import ConfigError


def ideal_bits(codec: Fp4, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 4 + 32 / codec.block


def test_by_hand() -> None:
    """Blocks of four with the largest 8 and 1; bounds are the middles of 8, 4, 2, ... 1/8, 0."""
    x = torch.tensor([8.0, -5.9, 3.1, -0.05, 0.5, -1.0])
    codes, scales = Fp4(block=4).encode(x).parts
    assert scales.tolist() == [8.0, 1.0]
    assert codes.tolist() == [7 | (8 + 6) << 4, 6 | 8 << 4, 6 | (8 + 7) << 4]
    assert roundtrip(Fp4(block=4), x).tolist() == [8.0, -4.0, 4.0, 0.0, 0.5, -1.0]


def test_an_entry_is_off_by_a_third_of_itself_at_most() -> None:
    x = torch.linspace(1 / 64, 1, 5000) * torch.where(torch.arange(5000) % 2 == 0, 3.0, -3.0)
    x[0] = 3.0
    error = (roundtrip(Fp4(block=5000), x) - x).abs() / x.abs()
    assert 0.333 < error.max() <= 1 / 3 + 1e-6


@pytest.mark.parametrize("block", [1, 3, 32, 128, 5000])
def test_contraction(block: int) -> None:
    for x in (normal(4096), normal(4096) ** 5, torch.ones(4096), -torch.ones(4096), eighths(4096)):
        out = roundtrip(Fp4(block=block), x)
        assert ((out - x).abs() <= x.abs() * (1 + 1e-6)).all()
        assert squared_error(x, out) <= 1 - 1 / min(block, 4096)
    assert squared_error(normal(4096), roundtrip(Fp4(), normal(4096))) < 0.04


def test_the_largest_is_exact() -> None:
    x = normal(1280)
    for entries, out in zip(x.split(128), roundtrip(Fp4(), x).split(128), strict=True):
        place = entries.abs().argmax()
        assert out[place] == entries[place]


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e30, 3e38])
def test_extreme_sizes(size: float) -> None:
    out = roundtrip(Fp4(), torch.full((200,), size))
    torch.testing.assert_close(out, torch.full((200,), size))
    assert not roundtrip(Fp4(), torch.zeros(200)).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_nonfinite_entry_spoils_its_block_alone(bad: float) -> None:
    ranks = Ranks(Fp4(block=10), "residual", "gather", (40,), size=3)
    out = ranks.step(normal(40), with_entry(normal(40), 7, bad), normal(40))
    assert not out[:10].isfinite().any()
    assert out[10:].isfinite().all()


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(Fp4(block=100), eighths(1050)) == "4999eef3"


def test_settings_out_of_range() -> None:
    with pytest.raises(ConfigError, match="fp4: block must be at least 1, got 0"):
        Fp4(block=0)
