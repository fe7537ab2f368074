"""Packed positions: their size, and that no bytes decode to positions outside the tensor."""

from collections.abc import Iterator
from math import lgamma, log

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire import kernels
from gradwire.errors import WireError
from gradwire.kernels.reference.packing import PLAIN
from gradwire.wire.indices import (
    check_index,
    index_bytes,
    index_field,
    low_bits,
    pack_index,
    unpack_index,
)

both_backends = pytest.mark.parametrize("backend", ["numba", "reference"], indirect=True)
# The backend stays the same for all examples of a test.
lenient = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(name="backend")
def pinned_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    kernels.use(request.param)
    yield
    kernels.use("auto")


@st.composite
def choices(draw: st.DrawFn) -> tuple[int, Tensor]:
    """Draws a tensor length and some positions."""
    numel = draw(st.integers(0, 2000))
    some = draw(st.integers(0, numel))
    order = torch.randperm(numel, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return numel, order[:some].sort().values


@both_backends
def test_by_hand(backend: None) -> None:
    """Two of 24: blocks of 8, so 1 is entry 1 of block 0, and 20 is entry 4 of block 2."""
    bitmap, low = 0b01001, 0b100001
    assert pack_index(torch.tensor([1, 20]), 24).tolist() == [bitmap, low]


@both_backends
def test_a_bitmap_by_hand(backend: None) -> None:
    """Nine of 17 would take 26 bits in blocks of one entry; a bit per entry takes 17."""
    packed = pack_index(torch.tensor([0, 3, 5, 6, 8, 9, 11, 12, 16]), 17)
    assert packed.tolist() == [0b01101001, 0b00011011, 0b00000001]
    check_index(packed, 17, 9)


@both_backends
@pytest.mark.parametrize("numel", [8, 17, 1000, 1001])
def test_bitmaps_of_other_counts_or_lengths_are_refused(backend: None, numel: int) -> None:
    count = numel // 2
    packed = pack_index(torch.arange(count), numel)
    assert packed.numel() == -(-numel // 8)
    places = {"missing": 0, "extra": numel - 1} | {
        f"{i} beyond": i for i in range(numel, -numel % 8 + numel)
    }
    for place in places.values():
        flipped = packed.clone()
        flipped[place >> 3] ^= 1 << (place & 7)
        moved = flipped.clone()
        # The right number of bits, one of which may be beyond the end.
        moved[0] ^= 2
        with pytest.raises(WireError, match=f"does not hold {count} positions of a tensor of"):
            check_index(flipped, numel, count)
        if place >= numel:
            with pytest.raises(WireError, match=f"does not hold {count} positions of a tensor of"):
                check_index(moved, numel, count)


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 100, 1000, 1024, 4097, 1_000_000])
def test_positions_never_take_more_than_a_bitmap(numel: int) -> None:
    for count in {0, 1, numel // 100, numel // 5, numel // 4, numel // 3, numel // 2, numel}:
        assert index_bytes(numel, count) <= -(-numel // 8)


@pytest.mark.parametrize(
    ("ratio", "plain"), [(0.1, False), (0.24, False), (0.26, True), (0.9, True)]
)
def test_bitmaps_are_used_above_a_quarter(ratio: float, plain: bool) -> None:
    count = round(ratio * 100_000)
    assert (low_bits(100_000, count) == PLAIN) == plain
    assert (index_bytes(100_000, count) == 12_500) == plain


@both_backends
@lenient
@given(choice=choices())
def test_round_trip(backend: None, choice: tuple[int, Tensor]) -> None:
    numel, index = choice
    packed = pack_index(index, numel)
    assert packed.numel() == index_field(numel, index.numel()).numel
    check_index(packed, numel, index.numel())
    assert torch.equal(unpack_index(packed, numel, index.numel()), index)


@both_backends
@lenient
@given(choice=choices(), flips=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=5))
def test_flipped_bits_stay_inside_or_are_refused(
    backend: None, choice: tuple[int, Tensor], flips: list[int]
) -> None:
    numel, index = choice
    packed = pack_index(index, numel)
    for flip in flips:
        place = flip % (packed.numel() * 8)
        packed[place >> 3] ^= 1 << (place & 7)
    inside_or_refused(packed, numel, index.numel())


@both_backends
@lenient
@given(choice=choices(), data=st.data())
def test_noise_stays_inside_or_is_refused(
    backend: None, choice: tuple[int, Tensor], data: st.DataObject
) -> None:
    numel, index = choice
    size = index_field(numel, index.numel()).numel or 0
    noise = data.draw(st.binary(min_size=size, max_size=size))
    inside_or_refused(torch.tensor(list(noise), dtype=torch.uint8), numel, index.numel())


def inside_or_refused(packed: Tensor, numel: int, count: int) -> None:
    try:
        check_index(packed, numel, count)
    except WireError:
        return
    index = unpack_index(packed, numel, count)
    assert index.shape == (count,)
    assert ((index >= 0) & (index < numel)).all()


@both_backends
@pytest.mark.parametrize("numel", [20, 24, 29, 100])
def test_the_entry_after_the_last_is_refused(backend: None, numel: int) -> None:
    """The last block may extend beyond the tensor; its positions there are invalid."""
    index = torch.tensor([0, numel - 1])
    check_index(pack_index(index, numel), numel, 2)
    beyond = pack_index(torch.tensor([0, numel]), numel)
    with pytest.raises(
        WireError, match=f"message does not hold 2 positions of a tensor of {numel}"
    ):
        check_index(beyond, numel, 2)


def bits_and_entropy(ratio: float) -> tuple[float, float]:
    """Returns the size and the entropy of positions in a million entries, in bits per position."""
    numel = 1_000_000
    count = round(ratio * numel)
    log_choices = lgamma(numel + 1) - lgamma(count + 1) - lgamma(numel - count + 1)
    return 8 * (index_field(numel, count).numel or 0) / count, log_choices / log(2) / count


@pytest.mark.parametrize(("ratio", "measured"), [(0.1, 1.120), (0.01, 1.060), (0.001, 1.049)])
def test_size_is_close_to_the_entropy(ratio: float, measured: float) -> None:
    bits, entropy = bits_and_entropy(ratio)
    assert bits / entropy == pytest.approx(measured, abs=2e-3)


@pytest.mark.parametrize("ratio", [1e-4, 3e-4, 0.007, 0.03, 0.24, 0.3, 0.4, 0.9])
def test_size_is_less_than_a_bit_above_the_entropy(ratio: float) -> None:
    bits, entropy = bits_and_entropy(ratio)
    assert bits < entropy + 1


@pytest.mark.parametrize("numel", [1, 7, 1000, 1023, 1024, 4097])
def test_fewer_positions_take_at_most_one_byte_more(numel: int) -> None:
    """So a buffer for the largest count fits any number of entries above a threshold."""
    sizes = [index_bytes(numel, count) for count in range(numel + 1)]
    assert all(size <= most + 1 for i, most in enumerate(sizes) for size in sizes[: i + 1])
