"""Aggregations of gradients: by hand, and with lying ranks."""

import re
from typing import get_args

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.base.aggregation import Aggregation, aggregate, check_aggregation, trimmed_ranks
from gradwire.errors import ConfigError
from lockstep import noise

NAN = float("nan")
ROBUST: tuple[Aggregation, ...] = ("median", "trimmed", "diameter", "krum", "multi_krum")
GRADIENTS = torch.tensor([[1.0, -2.0], [2.0, 0.0], [3.0, 2.0], [4.0, -1.0], [100.0, 1.0]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mean", [22.0, 0.0]),
        # Two signs against two, and a zero: a tie.
        ("majority", [1.0, 0.0]),
        ("median", [3.0, 0.0]),
        # One off at each end.
        ("trimmed", [3.0, 0.0]),
        # All but the last, which is far from everyone.
        ("diameter", [2.5, -0.25]),
    ],
)
def test_by_hand(name: Aggregation, expected: list[float]) -> None:
    assert aggregate(GRADIENTS, name).tolist() == expected


def test_the_median_of_an_even_number_is_the_middle_of_two() -> None:
    assert aggregate(torch.tensor([[1.0], [2.0], [4.0], [9.0]]), "median").tolist() == [3.0]


def test_gradients_above_the_median_norm_are_scaled_down_to_it() -> None:
    """Norms 5, 10, 1 and 0: the median is 1, the lower of the two in the middle."""
    gradients = torch.tensor([[3.0, 4.0], [0.0, 10.0], [1.0, 0.0], [0.0, 0.0]])
    expected = torch.tensor([(0.6 + 0 + 1 + 0) / 4, (0.8 + 1 + 0 + 0) / 4])
    torch.testing.assert_close(aggregate(gradients, "median_norm"), expected)


def test_equal_norms_are_not_clipped() -> None:
    gradients = torch.tensor([[3.0, 4.0], [-5.0, 0.0], [0.0, 5.0]])
    assert torch.equal(aggregate(gradients, "median_norm"), aggregate(gradients, "mean"))
    assert aggregate(torch.zeros(3, 2), "median_norm").tolist() == [0.0, 0.0]


def test_an_entry_that_some_ranks_sent_is_divided_by_their_number() -> None:
    gradients = torch.tensor([[2.0, 0.0, 0.0], [4.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    assert aggregate(gradients, "coincident").tolist() == [3.0, 5.0, 0.0]


@pytest.mark.parametrize("name", ["median_norm", "coincident"])
def test_what_is_no_robust_aggregation_passes_nan_on(name: Aggregation) -> None:
    for lie in (NAN, float("inf")):
        gradients, _ = with_lying_rank(lie, 2)
        assert not aggregate(gradients, name).isfinite().any()


def test_a_tie_of_votes_is_zero() -> None:
    votes = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0], [0.0, 0.0, -1.0]])
    assert aggregate(votes, "majority").tolist() == [0.0, -1.0, 1.0]


def test_votes_count_alike_however_large() -> None:
    assert aggregate(torch.tensor([[1e30], [-1e-30], [-1e-30]]), "majority").tolist() == [-1.0]


@pytest.mark.parametrize("name", ["mean", "median_norm", "coincident", *ROBUST])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 13])
def test_gradients_that_agree_are_the_result(name: Aggregation, ranks: int) -> None:
    torch.testing.assert_close(aggregate(noise(9).repeat(ranks, 1), name), noise(9))


@pytest.mark.parametrize("name", get_args(Aggregation))
def test_nothing_of_nothing(name: Aggregation) -> None:
    assert aggregate(torch.zeros(3, 0), name).shape == (0,)


@pytest.mark.parametrize(
    ("ranks", "trimmed"), [(1, 0), (2, 0), (3, 1), (4, 1), (7, 1), (8, 2), (16, 4)]
)
def test_a_quarter_may_lie(ranks: int, trimmed: int) -> None:
    assert trimmed_ranks(ranks) == trimmed


def with_lying_rank(lie: float, lying_rank: int, ranks: int = 5) -> tuple[Tensor, Tensor]:
    """Returns all gradients, one of them all `lie`, and those of the honest ranks."""
    gradients = noise(ranks, 50)
    gradients[lying_rank] = lie
    return gradients, gradients[torch.arange(ranks) != lying_rank]


def within(result: Tensor, honest: Tensor) -> bool:
    low, high = honest.amin(dim=0), honest.amax(dim=0)
    return bool(((result >= low - 1e-6) & (result <= high + 1e-6)).all())


@pytest.mark.parametrize("lie", [1e6, -1e6, 1e30, float("inf"), -float("inf"), NAN])
@pytest.mark.parametrize("lying_rank", range(5))
@pytest.mark.parametrize("name", ROBUST)
def test_one_lying_rank_of_five_moves_nothing_beyond_the_honest(
    name: Aggregation, lying_rank: int, lie: float
) -> None:
    gradients, honest = with_lying_rank(lie, lying_rank)
    assert within(aggregate(gradients, name), honest)


@pytest.mark.parametrize("ranks", [13, 16])
def test_lying_ranks_among_many_are_left_out(ranks: int) -> None:
    """Beyond 12 ranks only sets of nearest gradients are tried."""
    gradients, honest = with_lying_rank(1e6, 3, ranks)
    assert within(aggregate(gradients, "diameter"), honest)


def test_one_lying_rank_decides_a_plain_mean() -> None:
    gradients, honest = with_lying_rank(1e6, 2)
    assert not within(aggregate(gradients, "mean"), honest)


def test_a_mean_passes_nan_on() -> None:
    gradients, _ = with_lying_rank(NAN, 2)
    assert aggregate(gradients, "mean").isnan().all()


def test_nan_is_no_vote() -> None:
    votes = torch.tensor([[NAN, NAN], [-2.0, 1.0], [-1.0, -1.0]])
    assert aggregate(votes, "majority").tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("name", ROBUST)
def test_the_order_of_ranks_does_not_matter(name: Aggregation) -> None:
    gradients, _ = with_lying_rank(1e6, 1)
    torch.testing.assert_close(aggregate(gradients, name), aggregate(gradients.flip(0), name))


def test_an_unknown_name_is_refused() -> None:
    known = re.escape(str([*get_args(Aggregation)]))
    with pytest.raises(ConfigError, match=f"gather: aggregate must be one of {known}, got 'mode'"):
        check_aggregation("mode")
    with pytest.raises(ConfigError, match=f"gather: aggregate must be one of {known}, got 'mode'"):
        gradwire.simulate(
            {"w": torch.zeros(64, 64)}, "none", workers=2, exchange="gather:aggregate=mode"
        )


def descend(exchange_name: str, lie: float) -> float:
    """Returns the distance from the optimum where one worker of five lies in every step."""
    optimum, x = noise(32, 40, seed=1), torch.zeros(32, 40)
    sim = gradwire.simulate({"w": x}, "qsgd:bits=8", workers=5, exchange=exchange_name)
    for step in range(25):
        grads = [{"w": x - optimum + 0.1 * noise(32, 40, seed=5 * step + r)} for r in range(5)]
        grads[2] = {"w": torch.full((32, 40), lie)}
        x = x - 0.2 * sim.step(grads)["w"]
    return float((x - optimum).norm() / optimum.norm())


@pytest.mark.parametrize("name", ROBUST)
def test_training_converges_despite_a_lying_rank(name: str) -> None:
    assert descend(f"gather:aggregate={name}", 1e6) < 0.1


def test_a_lying_rank_leads_the_mean_away() -> None:
    assert descend("gather", 1e6) > 1e3


def test_the_median_of_sparse_messages() -> None:
    """An entry that most ranks do not send is zero: sparse messages need ranks that agree."""
    sim = gradwire.simulate(
        {"w": torch.zeros(64, 64)},
        "topk:ratio=0.1",
        workers=3,
        memory="none",
        exchange="gather:aggregate=median",
    )
    common = noise(64, 64)
    out = sim.step([{"w": common}, {"w": common}, {"w": 1e6 * noise(64, 64, seed=1)}])["w"]
    assert sim.stats()["exchange"] == "gather:aggregate=median"
    sent = out != 0
    torch.testing.assert_close(out[sent], common[sent], rtol=0.01, atol=0)
    assert 300 < sent.sum() <= 410
