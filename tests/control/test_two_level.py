"""The second level among what the first says, in room for more of it: as on a card that runs on."""

import pytest
import torch
from torch import Tensor

from gradwire.compressors._sparsifier import ThresholdSparsifier
from gradwire.control.two_level import Gauge, Levels, Sends, at_factor, levels, sparsifier_of
from gradwire.spec import parse
from gradwire.types import EFInput, EncodeContext

NUMEL = 20_011
TURN = EncodeContext((NUMEL,), seed=3)

each = pytest.mark.parametrize("name", ["dgc", "redsync"])


def heavy() -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)) ** 3


def made(name: str, low: float, high: float, sends: Sends) -> tuple[Levels, ThresholdSparsifier]:
    gauge = Gauge(raw=True)
    gauge.start()
    both = sparsifier_of(levels(parse(f"{name}:ratio=0.1"), low, high, sends, False, gauge))
    first = at_factor(parse(f"{name}:ratio=0.1"), low)  # type: ignore[arg-type]
    assert isinstance(both, Levels)
    assert isinstance(first, ThresholdSparsifier)
    return both, first


@each
@pytest.mark.parametrize("sends", ["candidate", "floor"])
def test_the_choice_is_the_top_of_the_first_level(name: str, sends: Sends) -> None:
    x = heavy()
    both, first = made(name, 10, 500, sends)
    index = both.select_in_room(first, EFInput(x), TURN)
    outer = first.select(EFInput(x), TURN)
    assert torch.equal(index, index.unique())
    if sends == "floor":
        assert torch.equal(index, outer)
    assert torch.isin(index, outer).all()
    aim = round(NUMEL / (500 if sends == "candidate" else 10))
    assert 0.8 * aim <= index.numel() <= 2 * aim
    left = torch.ones(NUMEL, dtype=torch.bool)
    left[index] = False
    assert x[index].abs().min() >= x[left].abs().max()
    assert both.gauge.squares is not None
    _, floor, candidate, _ = both.gauge.squares
    torch.testing.assert_close(floor, x[outer].dot(x[outer]))
    if sends == "candidate":
        torch.testing.assert_close(candidate, x[index].dot(x[index]))


@each
def test_numbers_that_are_none_do_not_spread_into_the_room(name: str) -> None:
    """Positions behind the last are 0, where there is a NaN."""
    x = heavy()
    x[0], x[5] = torch.nan, torch.inf
    both, first = made(name, 10, 500, "candidate")
    index = both.select_in_room(first, EFInput(x), TURN)
    assert torch.equal(index, index.unique())
    assert {0, 5} <= set(index.tolist())
    assert index.numel() <= 2 * round(NUMEL / 500)


@each
def test_a_candidate_that_may_say_all_there_is_room_for(name: str) -> None:
    x = heavy()
    both, first = made(name, 10, 10 / 3, "candidate")
    outer = first.select(EFInput(x), TURN)
    assert torch.equal(both.select_in_room(first, EFInput(x), TURN), outer)


@each
def test_nothing_but_zeros(name: str) -> None:
    both, first = made(name, 10, 500, "candidate")
    assert both.select_in_room(first, EFInput(torch.zeros(NUMEL)), TURN).numel() == 0
