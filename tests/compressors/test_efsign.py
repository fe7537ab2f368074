"""EF-SignSGD: signs, and one scale that makes them the best picture signs can give."""

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

from gradwire.compressors.efsign import EFSign
from gradwire.errors import ConfigError
from gradwire.spec import parse


def ideal_bits(codec: EFSign, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 1


def test_signs_times_mean_magnitude() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, -5.0])
    bits, scale = EFSign().encode(x).parts
    assert bits.tolist() == [0b1010]
    assert scale.tolist() == [2.0]
    assert roundtrip(EFSign(), x).tolist() == [2.0, -2.0, 2.0, -2.0]


@pytest.mark.parametrize("numel", [1, 7, 8, 1000, 4097])
def test_error_formula(backend: str, numel: int) -> None:
    """|x|² - |x|₁²/n, on numbers whose sums are exact."""
    x = eighths(numel).double()
    exact = x.square().sum() - x.abs().sum().square() / numel
    error = (x - roundtrip(EFSign(), x).double()).square().sum()
    torch.testing.assert_close(error, exact, rtol=1e-5, atol=1e-5 * float(x.square().sum()))


def test_equal_magnitudes_are_exact() -> None:
    x = torch.where(torch.arange(1000) % 3 == 0, -0.25, 0.25)
    assert torch.equal(roundtrip(EFSign(), x), x)


def test_no_other_scale_is_closer() -> None:
    x = normal(1000)
    out = roundtrip(EFSign(), x)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert squared_error(x, out) < squared_error(x, out * factor)


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_result_is_the_mean_over_ranks_not_the_sum(exchange_name: str, size: int) -> None:
    ranks = Ranks("efsign", "none", exchange_name, (6,), size=size)
    out = ranks.step(*[torch.full((6,), 1.0 + rank) for rank in range(size)])
    assert out.tolist() == pytest.approx([(1 + size) / 2] * 6)


def test_the_first_step_has_the_scale_of_all_others() -> None:
    """No learning rate enters: a constant gradient is exact at every step."""
    ranks = Ranks("efsign", "residual", "gather", (9,))
    for _ in range(3):
        assert torch.equal(ranks.step(*[torch.full((9,), 0.5)] * 2), torch.full((9,), 0.5))
        assert torch.equal(ranks.residual(), torch.zeros(9))


def test_the_residual_has_the_scale_of_the_gradient() -> None:
    ranks = Ranks("efsign", "residual", "gather", (2,), size=1)
    assert ranks.step(torch.tensor([3.0, -1.0])).tolist() == [2.0, -2.0]
    assert ranks.residual().tolist() == [1.0, 1.0]
    assert ranks.step(torch.tensor([0.0, 0.0])).tolist() == [1.0, 1.0]
    assert ranks.residual().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_has_the_type_of_the_gradient(dtype: torch.dtype) -> None:
    ranks = Ranks("efsign", "residual", "gather", (50,))
    assert ranks.step(*[normal(50).to(dtype)] * 2).dtype == dtype


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_appear(backend: str, exchange_name: str, bad: float) -> None:
    ranks = Ranks("efsign", "none", exchange_name, (50,), size=3)
    out = ranks.step(normal(50), with_entry(normal(50), 7, bad), normal(50))
    assert not out[7].isfinite()


def test_one_bit_on_the_wire() -> None:
    assert bits_per_entry(EFSign(), normal(1_000_000)) <= 1.01


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(EFSign(), eighths(1024)) == "58cc5dc0"


def test_it_has_no_parameters() -> None:
    with pytest.raises(ConfigError, match=r"^efsign: unknown parameter \['lr'\], expected \[\]$"):
        parse("efsign:lr=0.1")
