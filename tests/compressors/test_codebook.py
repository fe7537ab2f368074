"""A codebook of bin means, by hand and by what it promises."""

import pytest
import torch
from few_ranks import eighths, normal, roundtrip, squared_error, wire_hash, with_entry
from torch import Tensor

from gradwire.compressors.codebook import Codebook
from gradwire.errors import ConfigError


def ideal_bits(codec: Codebook, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return codec.bits


def test_bins_are_uniform_and_decode_to_their_means() -> None:
    # Mean 0 and deviation 2: the boundaries of four bins over six deviations are -3, 0 and 3.
    x = torch.tensor([-4.0, -1.0, -1.0, 1.0, 1.0, 4.0]) * (2 / 6**0.5)
    unit = 2 / 6**0.5
    assert roundtrip(Codebook(bits=2), x).tolist() == pytest.approx((x / unit * unit).tolist())
    y = torch.tensor([-4.0, -2.0, -1.0, 1.0, 2.0, 4.0])
    # Deviation 2.65, so that 4 is just beyond the boundary at 3.97.
    assert roundtrip(Codebook(bits=2), y).tolist() == [-4.0, -1.5, -1.5, 1.5, 1.5, 4.0]
    assert roundtrip(Codebook(bits=1), y).tolist() == pytest.approx([-7 / 3] * 3 + [7 / 3] * 3)


def test_sums_are_exact() -> None:
    x = normal(10_000) ** 3 + 5
    assert float(roundtrip(Codebook(bits=2), x).double().sum()) == pytest.approx(
        float(x.double().sum())
    )


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_is_a_contraction(bits: int) -> None:
    one = torch.zeros(1000)
    one[3] = 1
    for x in (normal(1000), normal(1000) + 3, normal(1000) ** 7, one, torch.ones(1000)):
        assert squared_error(x, roundtrip(Codebook(bits=bits), x)) <= 1 - 1 / 1000


def test_more_bits_lose_less() -> None:
    x = normal(10_000)
    errors = [squared_error(x, roundtrip(Codebook(bits=bits, spread=12), x)) for bits in (2, 4, 8)]
    assert errors[0] > 4 * errors[1] > 64 * errors[2]


@pytest.mark.parametrize("value", [0.0, 3.0, -1e30, 1e-40])
def test_constants_are_exact(value: float) -> None:
    x = torch.full((10,), value)
    assert torch.equal(roundtrip(Codebook(), x), x)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_entries_break_the_whole_tensor(bad: float) -> None:
    assert not roundtrip(Codebook(), with_entry(normal(100), 7, bad)).isfinite().any()


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(Codebook(bits=2), eighths(1000)) == "5c6d9a6a"
    assert wire_hash(Codebook(bits=8, spread=12.0), eighths(1001)) == "d0d0468c"


@pytest.mark.parametrize("settings", [{"bits": 0}, {"bits": 9}, {"spread": 0}, {"spread": "wide"}])
def test_settings_out_of_range(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="codebook: "):
        Codebook(**settings)  # type: ignore[arg-type]
