"""EDEN: a random basis, the best levels for normal numbers, and a scale that removes the bias."""

import math
from itertools import pairwise

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

from gradwire.compressors.eden import POSITIVE, Eden, flips, hadamard, pieces, rotate
from gradwire.errors import ConfigError
from gradwire.types import EncodeContext

every_bits = pytest.mark.parametrize("bits", [1, 2, 3, 4])
ERRORS = {1: math.pi / 2 - 1, 2: 0.1331, 3: 0.0358, 4: 0.0096}


def draws(codec: Eden, x: Tensor, count: int) -> Tensor:
    return torch.stack(
        [roundtrip(codec, x, EncodeContext((x.numel(),), step=s)) for s in range(count)]
    )


def ideal_bits(codec: Eden, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return codec.bits + 32 / codec.block


def test_hadamard_by_hand() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert hadamard(rows).tolist() == [[5.0, -1.0, -2.0, 0.0]]
    assert torch.equal(hadamard(hadamard(rows)), rows)


def test_rotation_keeps_norms_and_goes_back() -> None:
    x, coins = normal(4, 64), flips(256, EncodeContext((256,)), torch.device("cpu")).view(4, 64)
    z = rotate(x, coins)
    torch.testing.assert_close(z.norm(dim=1), x.norm(dim=1))
    torch.testing.assert_close(rotate(z, coins), x, rtol=1e-5, atol=1e-6)


@every_bits
def test_levels_are_the_means_of_what_is_rounded_to_them(bits: int) -> None:
    """Lloyd's condition for standard normal numbers."""
    half = POSITIVE[bits]
    assert len(half) == 2 ** (bits - 1)
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(half)), 40.0]
    for level, (low, high) in zip(half, pairwise(edges), strict=True):
        mass = (math.erf(high / 2**0.5) - math.erf(low / 2**0.5)) / 2
        density = (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / (2 * math.pi) ** 0.5
        assert level == pytest.approx(density / mass, abs=2e-6)


@pytest.mark.parametrize(
    ("numel", "shapes"),
    [(0, []), (1, [(1, 64)]), (65, [(1, 64), (1, 64)]), (300, [(1, 256), (1, 64)]),
     (2 * 1024 + 512 + 7, [(2, 1024), (1, 512), (1, 64)])],
)  # fmt: skip
def test_pieces_cover_all_with_little_padding(numel: int, shapes: list[tuple[int, int]]) -> None:
    assert [(p.rows, p.width) for p in pieces(numel, 1024)] == shapes
    assert sum(rows * width for rows, width in shapes) < numel + 64


@every_bits
@pytest.mark.parametrize("spike", [0.0, 32.0])
def test_unbiased(bits: int, spike: float) -> None:
    """Also for the small entries beside a large one, which a single transform would lose."""
    x = with_entry(normal(300), 5, spike) if spike else normal(300)
    decoded = draws(Eden(bits=bits), x, 150).double()
    rest = with_entry(x, 5, 0.0)
    directions = torch.stack([rest, torch.ones(300), *normal(8, 300, seed=1)], dim=1).double()
    sums = decoded @ directions
    error = (sums.mean(0) - x.double() @ directions).abs()
    assert (error <= 4 * sums.std(0) / 150**0.5).all()


@every_bits
def test_the_decoded_component_along_the_gradient_is_exact(bits: int) -> None:
    """Not only on average: <decoded, x> = |x|² for every block."""
    x = normal(4096)
    assert float(roundtrip(Eden(bits=bits), x) @ x / (x @ x)) == pytest.approx(1, rel=1e-5)


@every_bits
def test_squared_error(bits: int) -> None:
    for x in (normal(8192), normal(8192) ** 5, torch.ones(8192), with_entry(normal(8192), 9, 1e4)):
        errors = [squared_error(x, row) for row in draws(Eden(bits=bits), x, 8)]
        assert sum(errors) / 8 == pytest.approx(ERRORS[bits], rel=0.1)


@every_bits
def test_closest_scale_is_a_contraction(bits: int) -> None:
    codec = Eden(bits=bits, scale="closest")
    pair = with_entry(with_entry(torch.zeros(4096), 3, 1.0), 77, 1.0)
    for x in (normal(4096), pair, torch.ones(4096), normal(4096) ** 5):
        error = squared_error(x, roundtrip(codec, x))
        assert error < squared_error(x, roundtrip(Eden(bits=bits), x)) + 1e-9
        assert error <= 1.3 * ERRORS[bits] / (1 + ERRORS[bits])
    assert codec.traits().contraction
    assert not codec.traits().unbiased
    assert not Eden(bits=bits).traits().contraction


def test_padding_is_zeros_and_nothing_else() -> None:
    """Memory after the last entry has no influence."""
    x = normal(5000)
    torch.testing.assert_close(
        roundtrip(Eden(bits=2), x[:100]), roundtrip(Eden(bits=2), x[:100].clone())
    )
    assert squared_error(x[:100], roundtrip(Eden(bits=4), x[:100])) < 0.05


def test_one_element_is_nearly_exact() -> None:
    decoded = draws(Eden(), torch.tensor([3.0]), 20)
    assert torch.allclose(decoded, torch.tensor(3.0), rtol=1e-5)


def test_ranks_share_a_rotation_steps_and_shards_do_not() -> None:
    x, ctx = normal(500), EncodeContext((500,), world_size=2)
    first = roundtrip(Eden(), x, ctx)
    assert torch.equal(roundtrip(Eden(), x, ctx._replace(rank=1)), first)
    for other in (ctx._replace(step=1), ctx._replace(seed=1), ctx._replace(rank=2)):
        assert not torch.allclose(roundtrip(Eden(), x, other), first)


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
def test_the_mean_over_ranks_is_unbiased(exchange_name: str) -> None:
    grads = [normal(300, seed=s) + 0.3 for s in range(3)]
    mean = sum(grads, torch.zeros(300)) / 3
    ranks = Ranks("eden:bits=2", "none", exchange_name, (300,), size=3)
    decoded = torch.stack([ranks.step(*grads) for _ in range(60)]).double()
    sums = decoded @ torch.stack([mean, torch.ones(300), grads[0]], dim=1).double()
    exact = torch.stack([mean @ mean, mean.sum(), mean @ grads[0]]).double()
    assert ((sums.mean(0) - exact).abs() <= 4 * sums.std(0) / 60**0.5 + 1e-3).all()


@every_bits
def test_bits_on_the_wire(bits: int) -> None:
    measured = bits_per_entry(Eden(bits=bits), normal(1_000_000))
    assert measured == pytest.approx(bits + 32 / 4096, rel=1e-3)


@pytest.mark.parametrize("size", [1e-38, 1e-25, 1e25, 1e36])
def test_the_size_of_a_gradient_does_not_matter(size: float) -> None:
    x = normal(1000) * size
    assert squared_error(x, roundtrip(Eden(bits=4), x)) < 0.012


@every_bits
@pytest.mark.parametrize("numel", [0, 1, 7])
def test_zeros_and_small_sizes(bits: int, numel: int) -> None:
    assert torch.equal(roundtrip(Eden(bits=bits), torch.zeros(numel)), torch.zeros(numel))
    assert roundtrip(Eden(bits=bits), normal(numel)).isfinite().all()


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_break_their_block(exchange_name: str, bad: float) -> None:
    ranks = Ranks("eden:block=64", "none", exchange_name, (600,), size=3)
    out = ranks.step(normal(600), with_entry(normal(600), 7, bad), normal(600))
    assert not out[7].isfinite()
    assert out[64:].isfinite().all()


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    """Of width 256 and with 8 as the largest, so that all sums are exact."""
    assert wire_hash(Eden(bits=2, block=256), eighths(512)) == "19c3760f"
    assert wire_hash(Eden(block=256), eighths(512)) == "d1d1df20"


@pytest.mark.parametrize("bits", [0, 5, 1.0])
def test_bits_out_of_range(bits: int) -> None:
    with pytest.raises(ConfigError, match=rf"^eden: bits must be .*1 to 4, got {bits}$"):
        Eden(bits=bits)


def test_block_out_of_range() -> None:
    with pytest.raises(ConfigError, match=r"^eden: block must be at least 64, got 32$"):
        Eden(block=32)
    with pytest.raises(ConfigError, match=r"^eden: block must be a power of two, got 100$"):
        Eden(block=100)


def test_unknown_scale() -> None:
    with pytest.raises(ConfigError, match="eden: scale must be 'unbiased' or 'closest', got 'x'"):
        Eden(scale="x")  # type: ignore[arg-type]
