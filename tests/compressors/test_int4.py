"""Block-wise 4-bit integers: nearest rounding within each block."""

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

from gradwire.compressors.int4 import SCALES, Int4
from gradwire.errors import ConfigError

both_scales = pytest.mark.parametrize("scale", ["fp32", "bf16"])
Scale = Literal["fp32", "bf16"]


def ideal_bits(codec: Int4, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 4 + 8 * SCALES[codec.scale].itemsize / codec.block


def test_by_hand() -> None:
    """Blocks of four with the units 1 and 0.5; the last is not full."""
    x = torch.tensor([7.0, -2.4, 2.6, 0.4, -3.5, 1.3])
    codes, scales = Int4(block=4).encode(x).parts
    assert codes.tolist() == [14 | 5 << 4, 10 | 7 << 4, 0 | 10 << 4]
    assert scales.tolist() == [7.0, 3.5]
    assert roundtrip(Int4(block=4), x).tolist() == pytest.approx([7.0, -2.0, 3.0, 0.0, -3.5, 1.5])


@both_scales
@pytest.mark.parametrize("block", [1, 3, 32, 128, 5000])
def test_no_entry_is_off_by_more_than_half_a_level_or_its_own_size(
    scale: Scale, block: int
) -> None:
    for x in (normal(1000), normal(1000) ** 5, torch.ones(1000), eighths(1000)):
        error = (roundtrip(Int4(block=block, scale=scale), x) - x).abs()
        largest = torch.stack([part.abs().max() for part in x.split(block)])
        unit = (largest / 7).repeat_interleave(block)[:1000]
        room = 1 + 1e-5 if scale == "fp32" else 1 + 2.0**-7
        assert (error <= torch.minimum(x.abs(), unit / 2) * room + unit * (room - 1) * 7).all()


@both_scales
@pytest.mark.parametrize("block", [32, 128])
def test_contraction(scale: Scale, block: int) -> None:
    """The largest of a block is all but exact, and no other gets worse."""
    for x in (normal(4096), normal(4096) ** 5, torch.ones(4096), -torch.ones(4096)):
        assert squared_error(x, roundtrip(Int4(block=block, scale=scale), x)) <= 1 - 0.99 / block
    assert (
        squared_error(normal(4096), roundtrip(Int4(block=block, scale=scale), normal(4096))) < 0.02
    )


def test_worst_case_is_a_contraction_still() -> None:
    """One large entry, and the others just below half a level."""
    x = with_entry(torch.full((128,), 0.0714), 0, 1.0)
    out = roundtrip(Int4(), x)
    assert out.count_nonzero() == 1
    assert out[0] == 1.0


def test_the_largest_is_exact() -> None:
    x = normal(1280)
    for entries, out in zip(x.split(128), roundtrip(Int4(), x).split(128), strict=True):
        place = entries.abs().argmax()
        assert out[place] == entries[place]


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e30, 3e38])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    x = torch.tensor([1.0, -1.0, 0.0, 1.0]) * size
    assert torch.equal(roundtrip(Int4(), x), x)


def test_what_rounding_lost_comes_later() -> None:
    ranks = Ranks("int4:block=4", "residual", "gather", (4,), size=1)
    x = torch.tensor([7.0, 0.25, 0.25, 0.25])
    total = torch.stack([ranks.step(x) for _ in range(40)]).mean(0)
    torch.testing.assert_close(total, x, rtol=0, atol=0.02)


@pytest.mark.parametrize(("scale", "block", "bits"), [("fp32", 128, 4.25), ("bf16", 32, 4.5)])
def test_bits_on_the_wire(scale: Scale, block: int, bits: float) -> None:
    codec = Int4(block=block, scale=scale)
    assert bits_per_entry(codec, normal(1_000_000)) == pytest.approx(bits, rel=1e-3)


@both_scales
@pytest.mark.parametrize("numel", [0, 1, 7])
def test_zeros_and_small_sizes(scale: Scale, numel: int) -> None:
    codec = Int4(scale=scale)
    assert torch.equal(roundtrip(codec, torch.zeros(numel)), torch.zeros(numel))
    assert roundtrip(codec, normal(numel)).isfinite().all()


@both_scales
@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_break_their_block(scale: Scale, exchange_name: str, bad: float) -> None:
    ranks = Ranks(f"int4:block=10,scale={scale}", "none", exchange_name, (60,), size=3)
    out = ranks.step(normal(60), with_entry(normal(60), 7, bad), normal(60))
    assert not out[7].isfinite()
    assert out[10:].isfinite().all()


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(Int4(), eighths(1003)) == "071fba7e"
    assert wire_hash(Int4(block=32, scale="bf16"), eighths(1003)) == "06e360e8"


@pytest.mark.parametrize("block", [0, -1, 1.5])
def test_block_out_of_range(block: int) -> None:
    with pytest.raises(ConfigError, match=rf"^int4: block must be .*at least 1, got {block}$"):
        Int4(block=block)


def test_unknown_scale() -> None:
    message = r"^int4: scale must be one of \['fp32', 'bf16'\], got 'fp16'$"
    with pytest.raises(ConfigError, match=message):
        Int4(scale="fp16")  # type: ignore[arg-type]
