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
from gradwire.wire.indices import check_index, index_bytes, index_field, pack_index, unpack_index

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
    """Two of eight: blocks of four, so 1 is entry 1 of block 0, and 4 is entry 0 of block 1."""
    bitmap, low = 0b0101, 0b0001
    assert pack_index(torch.tensor([1, 4]), 8).tolist() == [bitmap, low]


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
@pytest.mark.parametrize("numel", [5, 8, 13, 100])
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


@pytest.mark.parametrize("ratio", [1e-4, 3e-4, 0.007, 0.03, 0.24, 0.3, 0.4])
def test_size_is_less_than_a_bit_above_the_entropy(ratio: float) -> None:
    bits, entropy = bits_and_entropy(ratio)
    assert bits < entropy + 1


@pytest.mark.parametrize("numel", [1, 7, 1000, 1023, 1024, 4097])
def test_fewer_positions_take_at_most_one_byte_more(numel: int) -> None:
    """So a buffer for the largest count fits any number of entries above a threshold."""
    sizes = [index_bytes(numel, count) for count in range(numel + 1)]
    assert all(size <= most + 1 for i, most in enumerate(sizes) for size in sizes[: i + 1])
