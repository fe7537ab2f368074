"""Predictions of how long a call takes at a size, from smaller sizes."""

from collections.abc import Callable

import pytest

from gradwire.bench.microbench.probe import predicted_s, probe_sizes

NUMEL = 100_000_000


def power(exponent: float, at_full_s: float, ran: list[int]) -> Callable[[int], float]:
    def time_s(size: int) -> float:
        ran.append(size)
        return 1e-4 + at_full_s * (size / NUMEL) ** exponent

    return time_s


@pytest.mark.parametrize(("exponent", "at_full_s"), [(1, 0.2), (1, 20.0), (1.5, 25.0)])
def test_power_laws_are_continued(exponent: float, at_full_s: float) -> None:
    ran: list[int] = []
    found = predicted_s(NUMEL, power(exponent, at_full_s, ran), limit_s=30.0)
    assert found == pytest.approx(at_full_s, rel=0.05)
    assert ran == probe_sizes(NUMEL) == [390_625, 1_562_500, 6_250_000]


def test_probes_end_before_one_takes_long() -> None:
    ran: list[int] = []
    # 3.8, 31 and 244 s at the three smaller sizes.
    found = predicted_s(NUMEL, power(1.5, 15_625.0, ran), limit_s=30.0)
    assert found > 30.0
    assert ran == [390_625]


def test_noise_of_short_calls_does_not_exclude_a_method() -> None:
    times = iter((0.0001, 0.004, 0.01))
    assert predicted_s(NUMEL, lambda size: next(times), limit_s=30.0) == pytest.approx(0.16)
    times = iter((0.0, 0.0, 0.01))
    assert predicted_s(NUMEL, lambda size: next(times), limit_s=30.0) == pytest.approx(0.16)


def test_small_sizes_are_measured_at_once() -> None:
    assert probe_sizes(200_000) == []
    assert predicted_s(200_000, lambda size: 1e9, limit_s=1.0) == 0.0
