"""Two-level selection from padded buffers, as on a GPU that does not wait for the host."""

import pytest
import torch
from torch import Tensor

from gradwire.compressors._sparsifier import ThresholdSparsifier
from gradwire.control.two_level import (
    GainMeter,
    SentLevel,
    TwoLevelSparsifier,
    sparsifier_of,
    two_level,
    with_factor,
)
from gradwire.spec import parse
from gradwire.types import EFInput, EncodeContext

NUMEL = 20_011
CONTEXT = EncodeContext((NUMEL,), seed=3)

each = pytest.mark.parametrize("name", ["dgc", "redsync"])


def heavy_tailed() -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)) ** 3


def levels_of(
    name: str, low: float, high: float, sends: SentLevel
) -> tuple[TwoLevelSparsifier, ThresholdSparsifier]:
    gain_meter = GainMeter(raw=True)
    gain_meter.start()
    levels = sparsifier_of(
        two_level(parse(f"{name}:ratio=0.1"), low, high, sends, False, gain_meter)
    )
    first = with_factor(parse(f"{name}:ratio=0.1"), low)  # type: ignore[arg-type]
    assert isinstance(levels, TwoLevelSparsifier)
    assert isinstance(first, ThresholdSparsifier)
    return levels, first


@each
@pytest.mark.parametrize("sends", ["candidate", "floor"])
def test_the_second_level_is_the_top_of_the_first(name: str, sends: SentLevel) -> None:
    x = heavy_tailed()
    levels, first = levels_of(name, 10, 500, sends)
    index = levels.select_padded(first, EFInput(x), CONTEXT)
    outer = first.select(EFInput(x), CONTEXT)
    assert torch.equal(index, index.unique())
    if sends == "floor":
        assert torch.equal(index, outer)
    assert torch.isin(index, outer).all()
    target = round(NUMEL / (500 if sends == "candidate" else 10))
    assert 0.8 * target <= index.numel() <= 2 * target
    left = torch.ones(NUMEL, dtype=torch.bool)
    left[index] = False
    assert x[index].abs().min() >= x[left].abs().max()
    assert levels.gain_meter.squares is not None
    _, floor, candidate, _ = levels.gain_meter.squares
    torch.testing.assert_close(floor, x[outer].dot(x[outer]))
    if sends == "candidate":
        torch.testing.assert_close(candidate, x[index].dot(x[index]))


@each
def test_nonfinite_values_do_not_spread_into_the_padding(name: str) -> None:
    """Padded positions are 0, and the entry at position 0 is NaN."""
    x = heavy_tailed()
    x[0], x[5] = torch.nan, torch.inf
    levels, first = levels_of(name, 10, 500, "candidate")
    index = levels.select_padded(first, EFInput(x), CONTEXT)
    assert torch.equal(index, index.unique())
    assert {0, 5} <= set(index.tolist())
    assert index.numel() <= 2 * round(NUMEL / 500)


@each
def test_a_candidate_larger_than_the_floor_selects_the_whole_floor(name: str) -> None:
    x = heavy_tailed()
    levels, first = levels_of(name, 10, 10 / 3, "candidate")
    outer = first.select(EFInput(x), CONTEXT)
    assert torch.equal(levels.select_padded(first, EFInput(x), CONTEXT), outer)


@each
def test_zeros_select_nothing(name: str) -> None:
    levels, first = levels_of(name, 10, 500, "candidate")
    assert levels.select_padded(first, EFInput(torch.zeros(NUMEL)), CONTEXT).numel() == 0
