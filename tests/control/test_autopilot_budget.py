"""How many steps Autopilot takes to follow."""

from collections.abc import Callable

from gradwire.control._autopilot.budget import FEW, Horizon


def told(rate_at: Callable[[int], float], steps: int, every: int) -> list[int]:
    """What was taken to follow right after each of these epochs."""
    horizon, found = Horizon(), []
    for step in range(every, steps + 1, every):
        horizon.hear(step, rate_at(step))
        found.append(horizon.ahead(step))
    return found


def test_a_few_hundred_at_first_and_then_as_many_as_there_have_been() -> None:
    horizon = Horizon()
    assert [horizon.ahead(step) for step in (0, 50, FEW, FEW + 1)] == [FEW, FEW, FEW, FEW + 1]
    assert horizon.ahead(10_000) == 10_000


def test_of_a_rate_that_falls_evenly_it_knows_what_is_left() -> None:
    """It rises until step 1000 and is nothing at step 5000."""
    found = told(lambda step: min(step, 1000) * min(1, (5000 - step) / 4000), 4800, every=200)
    # At half of it after step 3000, at a quarter after step 4000, and at an eighth after step 4600.
    assert found[3000 // 200 - 2 : 3000 // 200] == [2800, 5000 - 3000]
    assert found[4000 // 200 - 2 : 4000 // 200] == [2000, 5000 - 4000]
    assert found[4600 // 200 - 1] == 600
    assert found[-1] == FEW


def test_after_a_stair_as_many_as_before_it() -> None:
    found = told(lambda step: 0.1 ** (step // 3000), 9000, every=1000)
    assert found == [1000, 2000, 3000, 3000, 3000, 3000, 3000, 3000, 3000]
    # A lower one that lasts for longer counts by itself.
    assert told(lambda step: 1.0 if step < 300 else 0.1, 1000, every=100)[2:] == [
        *[300] * 4,
        400,
        500,
        600,
        700,
    ]


def test_short_stairs_are_no_reason_to_expect_less_than_a_few_hundred() -> None:
    found = told(lambda step: 0.5 ** (step // 10), 100, every=10)
    assert found == [FEW] * 10


def test_a_little_less_is_the_same_rate_and_more_is_a_new_start_of_it() -> None:
    horizon = Horizon()
    for step, rate in ((500, 0.1), (600, 0.08), (1000, 0.051)):
        horizon.hear(step, rate)
        assert horizon.ahead(step) == step
    horizon.hear(1500, 0.4)
    # What has been has been; but a fall from here would be one of a rate of 500 steps.
    assert horizon.ahead(1500) == 1500
    horizon.hear(2000, 0.2)
    assert horizon.ahead(2000) == 500


def test_a_rise_that_nobody_told_of_is_seen_when_it_is_over() -> None:
    horizon = Horizon()
    horizon.hear(700, 0.05)
    horizon.hear(1000, 0.4, before=0.8)
    assert horizon.ahead(1000) == 1000
    assert horizon.ahead(2500) == 1500
