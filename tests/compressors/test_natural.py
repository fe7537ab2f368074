"""Natural compression: powers of two, exact on average, with a variance of an eighth at most."""

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

from gradwire.compressors.natural import Natural
from gradwire.errors import ConfigError
from gradwire.spec import parse
from gradwire.types import EncodeContext

SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max


def draws(x: Tensor, count: int) -> Tensor:
    """Returns decoded independent messages of `x`, one per row."""
    return torch.stack(
        [roundtrip(Natural(), x, EncodeContext((x.numel(),), step=s)) for s in range(count)]
    )


def powers(low: int, high: int) -> Tensor:
    return torch.tensor([2.0**e for e in range(low, high + 1)])


def ideal_bits(codec: Natural, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 8


def test_codes_by_hand() -> None:
    """1 is 2 below the largest power, 4; 126 is the code of that, and 128 the sign."""
    code, scale = Natural().encode(torch.tensor([1.0, -2.0, 0.0, 4.0])).parts
    assert code.tolist() == [124, 128 + 125, 0, 126]
    assert scale.tolist() == [4.0]


def test_buckets_have_their_own_largest_power() -> None:
    x = torch.cat([torch.full((1024,), 2.0**-20), torch.full((3,), -(2.0**100))])
    code, scale = Natural().encode(x).parts
    assert code.tolist() == [126] * 1024 + [128 + 126] * 3
    assert scale.tolist() == [2.0**-20, 2.0**100]


def test_no_scale_is_below_the_one_from_which_codes_reach_the_smallest_number() -> None:
    code, scale = Natural().encode(torch.tensor([2.0**-100, SMALLEST, 0.0])).parts
    assert scale.tolist() == [2.0**-24]
    assert code.tolist() == [126 - 76, 1, 0]


@pytest.mark.parametrize(("low", "high"), [(-149, -24), (-60, 65), (2, 127)])
def test_powers_of_two_are_exact(low: int, high: int) -> None:
    """As many octaves as there are codes, anywhere in the range of float32."""
    x = powers(low, high)
    assert x.numel() == 126
    assert torch.equal(roundtrip(Natural(), torch.cat([x, -x])), torch.cat([x, -x]))


def test_entries_between_powers_go_to_a_neighbour() -> None:
    decoded = draws(torch.tensor([-5.0]), 400)
    assert set(decoded.view(-1).tolist()) == {-4.0, -8.0}
    assert decoded.mean() == pytest.approx(-5, abs=4 * 3**0.5 / 20)


@pytest.mark.parametrize("size", [1e-44, 1e-39, 1e-20, 1.0, 1e30])
def test_unbiased(size: float) -> None:
    x = (normal(300) * size).double()
    decoded = draws(x.float(), 1000).double()
    exact = x.float().double()
    directions = torch.stack([exact.sign(), torch.ones(300), *normal(8, 300, seed=1)], 1).double()
    sums = decoded @ directions
    error = (sums.mean(0) - exact @ directions).abs()
    assert (error <= 4 * sums.std(0) / 1000**0.5).all()


@pytest.mark.parametrize("entry", [4 / 3, 1.01, 1.99, 2 * SMALLEST, 3 * SMALLEST, 1e-40, 1e38])
def test_variance_is_an_eighth_at_most_and_reached(entry: float) -> None:
    x = torch.full((20_000,), entry)
    decoded = roundtrip(Natural(), x).double()
    errors = (decoded - x.double()).square() / x.double().square()
    assert errors.mean() <= 1 / 8 + 4 * errors.std() / 20_000**0.5
    if entry == 4 / 3:
        assert errors.mean() == pytest.approx(1 / 8, abs=4 * float(errors.std()) / 20_000**0.5)


def test_nothing_in_range_is_off_by_more_than_itself() -> None:
    x = normal(10_000) * torch.exp(10 * normal(10_000, seed=1))
    ratio = roundtrip(Natural(), x) / x
    assert (ratio > 0.5).all()
    assert (ratio <= 2).all()


def test_the_smallest_beside_the_largest_become_zero() -> None:
    x = torch.tensor([2.0**100, 2.0**-25, -(2.0**-26), SMALLEST])
    assert roundtrip(Natural(), x).tolist() == [2.0**100, 2.0**-25, 0.0, 0.0]


def test_the_largest_numbers_stay_finite() -> None:
    x = torch.tensor([LARGEST, -LARGEST, 2.0**127, 4.0])
    for decoded in draws(x, 10):
        assert decoded.tolist() == [2.0**127, -(2.0**127), 2.0**127, 4.0]


@pytest.mark.parametrize("numel", [0, 1, 7, 30])
def test_zeros_and_small_sizes(backend: str, numel: int) -> None:
    assert torch.equal(roundtrip(Natural(), torch.zeros(numel)), torch.zeros(numel))
    assert torch.equal(roundtrip(Natural(), torch.full((numel,), -0.5)), torch.full((numel,), -0.5))


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_appear_where_they_are(
    backend: str, exchange_name: str, bad: float
) -> None:
    ranks = Ranks("natural", "none", exchange_name, (60,), size=3)
    out = ranks.step(normal(60), with_entry(normal(60), 7, bad), normal(60))
    assert out.isfinite().logical_not().nonzero().tolist() == [[7]]


def test_infinity_keeps_its_sign_and_all_may_be_bad() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert roundtrip(Natural(), x).tolist() == [torch.inf, -torch.inf, torch.inf]


def test_ranks_round_independently_and_steps_too() -> None:
    x, ctx = normal(1000), EncodeContext((1000,), world_size=2)
    first = roundtrip(Natural(), x, ctx)
    for other in (ctx._replace(rank=1), ctx._replace(step=1), ctx._replace(seed=1)):
        assert (roundtrip(Natural(), x, other) != first).float().mean() > 0.1


def test_the_mean_of_many_ranks_is_closer() -> None:
    x = normal(1000)
    one = Ranks("natural", "none", "gather", (1000,), size=1).step(x)
    many = Ranks("natural", "none", "gather", (1000,), size=16).step(*[x] * 16)
    assert squared_error(x, many) < 0.15 * squared_error(x, one) < 0.15 / 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_has_the_type_of_the_gradient(dtype: torch.dtype) -> None:
    ranks = Ranks("natural", "none", "gather", (50,))
    assert ranks.step(*[normal(50).to(dtype)] * 2).dtype == dtype


def test_eight_bits_on_the_wire() -> None:
    assert bits_per_entry(Natural(), normal(1_000_000)) <= 8.04


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(Natural(), eighths(1003)) == "3a8e3a48"


def test_it_has_no_parameters() -> None:
    with pytest.raises(ConfigError, match=r"^natural: unknown parameter \['bits'\]"):
        parse("natural:bits=4")
