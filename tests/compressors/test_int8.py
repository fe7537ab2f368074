"""Block-wise 8-bit integers: nearest rounding within each block."""

import pytest
import torch
from few_ranks import bits_per_entry, eighths, normal, roundtrip, squared_error, wire_hash
from torch import Tensor

from gradwire.compressors.int8 import Int8
from gradwire.errors import ConfigError


def ideal_bits(codec: Int8, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 8 + 32 / codec.block


def test_by_hand() -> None:
    """Blocks of four with the units 1 and 0.5; the last is not full."""
    x = torch.tensor([127.0, -2.4, 2.6, 0.4, -63.5, 1.3])
    codes, scales = Int8(block=4).encode(x).parts
    assert codes.tolist() == [254, 125, 130, 127, 0, 130]
    assert scales.tolist() == [127.0, 63.5]
    expected = [127.0, -2.0, 3.0, 0.0, -63.5, 1.5]
    assert roundtrip(Int8(block=4), x).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("block", [1, 3, 32, 256, 5000])
def test_no_entry_is_off_by_more_than_half_a_level_or_its_own_size(block: int) -> None:
    for x in (normal(1000), normal(1000) ** 5, torch.ones(1000), eighths(1000)):
        out = roundtrip(Int8(block=block), x)
        largest = torch.stack([part.abs().max() for part in x.split(block)])
        unit = (largest / 127).repeat_interleave(block)[:1000]
        assert ((out - x).abs() <= torch.minimum(x.abs(), unit / 2) + unit * 1e-3).all()


def test_the_largest_is_exact() -> None:
    x = normal(2560)
    for entries, out in zip(x.split(256), roundtrip(Int8(), x).split(256), strict=True):
        place = entries.abs().argmax()
        assert out[place] == entries[place]


def test_the_error_falls_with_the_square_of_the_levels() -> None:
    """Four bits lose at most 1 % of a normal tensor, and 8 bits (7 / 127)^2 of that."""
    assert squared_error(normal(4096), roundtrip(Int8(), normal(4096))) < 1e-4


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e30, 3e38])
def test_the_size_of_a_tensor_does_not_matter(size: float) -> None:
    x = torch.tensor([1.0, -1.0, 0.0, 1.0]) * size
    assert torch.equal(roundtrip(Int8(), x), x)


def test_bits_on_the_wire() -> None:
    assert bits_per_entry(Int8(), normal(1_000_000)) == pytest.approx(8.125, rel=1e-3)


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(Int8(), eighths(1003)) == "536e6479"


@pytest.mark.parametrize("block", [0, -1, 1.5])
def test_block_out_of_range(block: int) -> None:
    with pytest.raises(ConfigError, match=rf"^int8: block must be .*at least 1, got {block}$"):
        Int8(block=block)
