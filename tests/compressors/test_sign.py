"""Sign: one bit an entry, a scale from any norm, and the contraction that goes with it."""

import pytest
import torch
from few_ranks import Ranks, bits_per_entry, eighths, normal, roundtrip, squared_error, wire_hash
from torch import Tensor

from gradwire.compressors.efsign import EFSign
from gradwire.compressors.sign import Sign
from gradwire.errors import ConfigError

every_norm = pytest.mark.parametrize("norm", range(1, 7))


def inputs() -> list[Tensor]:
    """Even, uneven, and as uneven as can be."""
    spike = torch.zeros(64)
    spike[5] = -3.0
    return [torch.ones(64), normal(64), normal(64) ** 9, spike]


def ideal_bits(codec: Sign, x: Tensor) -> float:
    """Returns the fewest bits per entry that hold the message; `test_bits.py` compares."""
    return 1


def test_scales_by_hand() -> None:
    """3 and 4 have the norms 7 and 5."""
    x = torch.tensor([3.0, -4.0])
    assert roundtrip(Sign(), x).tolist() == [3.5, -3.5]
    assert roundtrip(Sign(norm=2), x).tolist() == [2.5, -2.5]


def test_norm_one_is_what_ef_signsgd_sends(backend: str) -> None:
    for x in inputs():
        assert torch.equal(roundtrip(Sign(), x), roundtrip(EFSign(), x))


@every_norm
def test_error_is_within_its_bound(norm: int) -> None:
    for x in inputs():
        k = x.numel()
        removed = torch.linalg.vector_norm(x.double(), norm) ** 2 / k / x.double().square().sum()
        assert squared_error(x, roundtrip(Sign(norm=norm), x)) <= 1 - removed + 1e-6
        assert removed >= (1 / k if norm == 1 else k ** (2 / norm - 2)) * (1 - 1e-9)


@every_norm
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_size_of_a_gradient_does_not_matter(norm: int, size: float) -> None:
    x = normal(640)
    torch.testing.assert_close(
        roundtrip(Sign(norm=norm), x * size) / size, roundtrip(Sign(norm=norm), x)
    )


@every_norm
@pytest.mark.parametrize("numel", [0, 1, 7])
def test_zeros_and_sizes(norm: int, numel: int) -> None:
    ranks = Ranks(Sign(norm=norm), "residual", "gather", (numel,))
    assert torch.equal(ranks.step(*[torch.zeros(numel)] * 2), torch.zeros(numel))
    if numel == 1:
        torch.testing.assert_close(
            ranks.step(*[torch.full((1,), -1.5)] * 2), torch.full((1,), -1.5)
        )


@every_norm
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_entries_break_the_whole_tensor(backend: str, norm: int, bad: float) -> None:
    x = normal(100)
    x[7] = bad
    assert not roundtrip(Sign(norm=norm), x).isfinite().any()


def test_bits_on_the_wire() -> None:
    assert bits_per_entry(Sign(), normal(1_000_000)) == pytest.approx(1, abs=1e-3)


def test_bytes_on_the_wire_are_frozen(backend: str) -> None:
    assert wire_hash(Sign(), eighths(1024)) == wire_hash(EFSign(), eighths(1024))
    x = torch.zeros(32)
    x[3], x[30] = 3.0, -4.0
    assert wire_hash(Sign(norm=2), x) == "9ff123ae"


@pytest.mark.parametrize("norm", [0, 7, 1.5])
def test_norm_out_of_range(norm: int) -> None:
    with pytest.raises(ConfigError, match=rf"^sign: norm must be .*1 to 6, got {norm}$"):
        Sign(norm=norm)
