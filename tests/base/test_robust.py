"""Robust aggregations: what each one guarantees, and how many ranks it needs."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.base.aggregation import (
    ROBUST,
    Aggregation,
    aggregate,
    check_ranks,
    least_ranks,
    tolerated,
)
from gradwire.base.robust_selection import closest_subset, krum_order
from gradwire.errors import ConfigError
from lockstep import Lockstep, noise

RANKS, FAULTY = 11, 4
EACH = pytest.mark.parametrize("name", ROBUST)
NAN, INF = float("nan"), float("inf")


def with_liars(lie: float, ranks: int = RANKS, faulty: int = FAULTY) -> tuple[Tensor, Tensor]:
    """Returns gradients around 1 of which the first ones are all `lie`, and the honest ones."""
    gradients = 1 + noise(ranks, 60)
    gradients[:faulty] = lie
    return gradients, gradients[faulty:]


def test_krum_by_hand() -> None:
    """With 5 ranks and one faulty the two nearest count: 1 + 1 for the middle of three."""
    gradients = torch.tensor([[0.0], [1.0], [2.0], [5.0], [50.0]])
    assert krum_order(gradients, 1) == [1, 0, 2, 3, 4]
    assert aggregate(gradients, "krum", 1).tolist() == [1.0]
    assert aggregate(gradients, "multi_krum", 1).tolist() == [2.0]


def test_the_geometric_median_of_a_line_is_its_median() -> None:
    gradients = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [400.0, 400.0]])
    found = aggregate(gradients, "geometric_median")
    torch.testing.assert_close(found, torch.tensor([2.0, 2.0]), atol=1e-3, rtol=0)


def test_the_geometric_median_has_unit_vectors_that_cancel() -> None:
    gradients = noise(9, 5)
    steps = gradients - aggregate(gradients, "geometric_median")
    assert float(torch.nn.functional.normalize(steps).mean(dim=0).norm()) < 0.01


def test_clipping_by_hand() -> None:
    """From the median 2 the offsets are -2, -1, 0, 1, 98, cut at 1: no more pull than the least."""
    gradients = torch.tensor([[0.0], [1.0], [2.0], [3.0], [100.0]])
    assert aggregate(gradients, "clipped").tolist() == [2.0]


def test_mixing_by_hand() -> None:
    """Two of three are near: 0 and 1 become their mean, and the faulty 10 the mean with 1."""
    mixed = aggregate(torch.tensor([[0.0], [1.0], [10.0]]), "trimmed", 1, mix=True)
    assert mixed.tolist() == [0.5]


@pytest.mark.parametrize("mix", [False, True])
@pytest.mark.parametrize("name", ["trimmed", "diameter", "multi_krum"])
def test_without_faulty_ranks_it_is_the_mean_bit_for_bit(name: Aggregation, mix: bool) -> None:
    gradients = noise(7, 200)
    found = aggregate(gradients, name, 0, mix)
    if mix:
        torch.testing.assert_close(found, gradients.mean(dim=0))
    else:
        assert torch.equal(found, aggregate(gradients, "mean"))


@EACH
@pytest.mark.parametrize("mix", [False, True])
def test_the_order_of_ranks_has_no_influence(name: Aggregation, mix: bool) -> None:
    gradients, _ = with_liars(1e3)
    order = torch.randperm(RANKS, generator=torch.Generator().manual_seed(3))
    found = aggregate(gradients, name, FAULTY, mix)
    torch.testing.assert_close(aggregate(gradients[order], name, FAULTY, mix), found)


@EACH
@pytest.mark.parametrize("lie", [1e6, 1e30, 3e38, INF, -INF, NAN])
@pytest.mark.parametrize("mix", [False, True])
def test_all_tolerated_ranks_may_send_anything(name: Aggregation, lie: float, mix: bool) -> None:
    gradients, honest = with_liars(lie)
    found = aggregate(gradients, name, FAULTY, mix)
    center = honest.mean(dim=0)
    spread = float((honest - center).norm(dim=1).max())
    assert float((found - center).norm()) < 3 * spread


@EACH
def test_liars_that_differ_from_each_other_are_no_better(name: Aggregation) -> None:
    gradients, honest = with_liars(0)
    for rank, lie in enumerate((NAN, INF, -3e38, 3e38)):
        gradients[rank] = lie
    found = aggregate(gradients, name, FAULTY)
    center = honest.mean(dim=0)
    assert float((found - center).norm()) < 3 * float((honest - center).norm(dim=1).max())


@pytest.mark.parametrize("distance", [3.0, 4.5, 8.0, 1e4])
@pytest.mark.parametrize("faulty", [1, 3, 5])
def test_the_subset_of_least_diameter_stays_near_an_honest_ball(
    faulty: int, distance: float
) -> None:
    """Honest rows within a radius r of their mean: the result is within 2 r of it.

    With n >= 2 f + 1 a selected subset has an honest row, and its diameter is at most 2 r.
    """
    gradients = torch.nn.functional.normalize(noise(2 * faulty + 1, 8, seed=faulty))
    honest = gradients[faulty:]
    center = honest.mean(dim=0)
    radius = float((honest - center).norm(dim=1).max())
    gradients[:faulty] = center + distance * torch.nn.functional.normalize(noise(8, seed=9), dim=0)
    found = aggregate(gradients, "diameter", faulty)
    assert float((found - center).norm()) <= 2 * radius + 1e-5


def test_ties_go_to_the_lower_ranks() -> None:
    gradients = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    assert closest_subset(gradients, 1) == [0, 1, 2]
    assert krum_order(torch.ones(5, 3), 1) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("ranks", "faulty"), [(16, 4), (30, 9)])
def test_liars_among_many_ranks_are_left_out(ranks: int, faulty: int) -> None:
    """Of 16 ranks all subsets are tried, of 30 those of nearest rows."""
    gradients, _ = with_liars(7.0, ranks, faulty)
    assert closest_subset(gradients, faulty) == [*range(faulty, ranks)]


@pytest.mark.parametrize(
    ("name", "faulty", "least"),
    [("median", 3, 7), ("trimmed", 2, 5), ("diameter", 4, 9), ("krum", 2, 7), ("clipped", 0, 1)],
)
def test_the_least_number_of_ranks(name: Aggregation, faulty: int, least: int) -> None:
    assert least_ranks(name, faulty) == least
    check_ranks(name, least, faulty)
    if faulty:
        with pytest.raises(ConfigError, match=f"needs at least .* = {least} ranks, got"):
            check_ranks(name, least - 1, faulty)


@EACH
@pytest.mark.parametrize("ranks", range(1, 14))
def test_without_a_number_any_world_size_is_legal(name: Aggregation, ranks: int) -> None:
    check_ranks(name, ranks)
    assert ranks >= 2 * tolerated(name, ranks) + (ROBUST[name] if tolerated(name, ranks) else 1)
    assert aggregate(noise(ranks, 5), name).isfinite().all()


def weights() -> dict[str, Tensor]:
    return {"w": torch.zeros(64, 64)}


@pytest.mark.parametrize(
    ("exchange", "workers", "error"),
    [
        (
            "gather:aggregate=krum,faulty=4",
            10,
            r"gather: aggregate=krum with faulty=4 needs at least 2 \* 4 \+ 3 = 11 ranks, got 10",
        ),
        ("gather:aggregate=diameter,faulty=2", 4, r"2 \* 2 \+ 1 = 5 ranks, got 4"),
        ("gather:faulty=1", 4, "faulty=1 is a setting of the robust aggregations .*'mean'"),
        ("gather:aggregate=majority,mix=true", 4, "mix=true is a setting of the robust"),
        ("gather:aggregate=median,faulty=-2", 4, "faulty must be at least -1, got -2"),
        ("gather:aggregate=median,faulty=two", 4, "faulty must be of type int, got 'two'"),
    ],
)
def test_bad_numbers_are_refused_by_name(exchange: str, workers: int, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        gradwire.simulate(weights(), "none", workers=workers, exchange=exchange)


@EACH
@pytest.mark.parametrize("spec", ["none", "qsgd:bits=8"])
def test_all_ranks_select_alike(name: Aggregation, spec: str) -> None:
    gradients = noise(7, 4000)
    gradients[[2, 5]] *= 1e4
    ranks = Lockstep(spec, "none", f"gather:aggregate={name},faulty=2", 4000, 7)
    # Raises an error unless all ranks have the same bits.
    assert float(ranks.step(*gradients).norm()) < 2 * float(gradients[0].norm())


@EACH
def test_as_many_liars_as_were_announced_may_be_non_finite(name: Aggregation) -> None:
    for liars, skipped in ((2, 0), (3, 1)):
        exchange = f"gather:aggregate={name},faulty=2"
        sim = gradwire.simulate(weights(), "none", workers=7, exchange=exchange)
        grads = [{"w": noise(64, 64, seed=rank)} for rank in range(7)]
        for rank in range(liars):
            grads[2 * rank]["w"][3, 3] = NAN
        found = sim.step(grads)["w"]
        assert sim.stats()["skipped"] == skipped
        assert bool(found.isfinite().all()) == (not skipped)
