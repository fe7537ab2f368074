"""Estimated thresholds are the same in every backend, to one unit in the last place."""

import math
from statistics import NormalDist
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference
from gradwire.types import EFInput
from odd import apart, normal, odd_numbers, same_numbers

NAMES = ["sampled_threshold", "bisected_threshold", "excess_threshold", "normal_threshold"]

each_backend = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])
each_name = pytest.mark.parametrize("name", NAMES)


def threshold(backend: ModuleType, name: str, ef: EFInput, count: int) -> Tensor:
    """Computes a threshold with the settings of a method that targets `count` entries."""
    numel = max(1, ef.grad.numel())
    sample_size = max(1, numel // 3)
    settings: dict[str, tuple[object, ...]] = {
        "sampled_threshold": (7, sample_size, max(1, count // 3), math.ceil(0.8 * count)),
        "bisected_threshold": (count,),
        "excess_threshold": ([0.25, 0.25, 0.16],),
        "normal_threshold": (-NormalDist().inv_cdf(count / numel / 2), count, 16),
    }
    found: Tensor = getattr(backend, name)(ef, *settings[name])
    return found


@each_name
@pytest.mark.parametrize("numel", [1, 7, 1000, 4097, 300_000])
@pytest.mark.parametrize("kind", odd_numbers(0))
def test_alike_in_both_backends(kind: str, numel: int, name: str) -> None:
    x = odd_numbers(numel)[kind]
    count = max(1, numel // 20)
    expected = threshold(reference, name, EFInput(x), count)
    residual_out = torch.full_like(x, torch.nan)
    found = threshold(cpu, name, EFInput(x, torch.zeros_like(x), residual_out), count)
    assert found.shape == expected.shape == (1,)
    assert apart(found, expected) <= 1
    assert same_numbers(residual_out, x)


@each_backend
@each_name
def test_of_nothing(backend: ModuleType, name: str) -> None:
    assert threshold(backend, name, EFInput(torch.zeros(0)), 1).tolist() == [0.0]


@each_backend
@each_name
def test_about_as_many_reach_it(backend: ModuleType, name: str) -> None:
    x = normal(100_000)
    reach = reference.select_above(EFInput(x), threshold(backend, name, EFInput(x), 1000)).numel()
    assert 500 <= reach <= 2000


@each_backend
@each_name
def test_non_finite_entries_count_as_zero(backend: ModuleType, name: str) -> None:
    x = normal(10_000)
    x[::7] = 0.0
    odd = x.clone()
    odd[::7] = torch.nan
    odd[::14] = -torch.inf
    plain, other = (threshold(backend, name, EFInput(t), 100) for t in (x, odd))
    assert torch.equal(plain, other)


@each_backend
def test_a_sampled_threshold_by_hand(backend: ModuleType) -> None:
    """All are sampled: the second largest is 8; three are wanted, so 6.4, 5.12, then 4.096."""
    x = EFInput(torch.tensor([8.0, -9.0, 4.5, 1.0]))
    assert backend.sampled_threshold(x, 1, 4, 2, 2).tolist() == [8.0]
    found = backend.sampled_threshold(x, 1, 4, 2, 3)
    assert found.tolist() == pytest.approx([8 * 0.8**3])
    # Lowered ten times at most: four entries can never be ten.
    assert backend.sampled_threshold(x, 1, 4, 2, 10).tolist() == pytest.approx([8 * 0.8**10])


@each_backend
def test_a_fitted_threshold_by_hand(backend: ModuleType) -> None:
    """Mean 2: a quarter is above 2 ln 4; three of four go beyond 1 by 1, 2 and 4 on average."""
    x = EFInput(torch.tensor([-2.0, 2.0, 1.0, -3.0]))
    assert backend.excess_threshold(x, [0.25]).tolist() == pytest.approx([2 * math.log(4)])
    assert backend.excess_threshold(x, [0.001]).tolist() == [3.0]


@each_backend
def test_a_bisected_threshold_by_hand(backend: ModuleType) -> None:
    """Mean 4, largest 16: one reaches 10; two to four reach 7."""
    x = EFInput(torch.tensor([16.0, 1.0, -8.0, 2.0, 3.0, 1.0, 0.0, 1.0]))
    assert backend.bisected_threshold(x, 1).tolist() == [10.0]
    assert backend.bisected_threshold(x, 2).tolist() == [7.0]


@each_backend
def test_a_normal_threshold_by_hand(backend: ModuleType) -> None:
    """Mean 1, deviation 2: none reaches 1 + 1.5 * 2, both reach half of it."""
    x = EFInput(torch.tensor([3.0, -1.0, 3.0, -1.0]))
    assert backend.normal_threshold(x, 1.5, 2, 0).tolist() == [3.0]
    assert backend.normal_threshold(x, 1.5, 2, 1).tolist() == [2.0]
    assert backend.normal_threshold(x, 0.0, 2, 3).tolist() == [1.5]


@each_backend
def test_a_normal_threshold_by_bisection(backend: ModuleType) -> None:
    """Deviation √2: all four 2s reach it, none 1.5 times as much; of four ties none are one."""
    x, deviation = EFInput(torch.tensor([2.0, -2.0, 0.0, 0.0, 2.0, -2.0, 0.0, 0.0])), 2**0.5
    thresholds = [backend.normal_threshold(x, 1.0, 1, rounds).item() for rounds in range(4)]
    # At most the largest entry; with bounds on either side, the lower one.
    assert thresholds == pytest.approx([deviation, 2.0, deviation, 1.25 * deviation])
    # From 1 to 100, two to four are wanted: above 96 to 98.
    x = EFInput(torch.arange(1.0, 101.0))
    assert 96 < backend.normal_threshold(x, 5.0, 3, 16).item() <= 99
