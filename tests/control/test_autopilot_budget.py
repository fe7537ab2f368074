"""The number of remaining steps that Autopilot expects."""

from collections.abc import Callable

from gradwire.control._autopilot.budget import MIN_REMAINING, RemainingSteps


def expected_steps(rate_at: Callable[[int], float], steps: int, every: int) -> list[int]:
    """Returns the expected remaining steps after each epoch."""
    remaining, found = RemainingSteps(), []
    for step in range(every, steps + 1, every):
        remaining.learning_rate_changed(step, rate_at(step))
        found.append(remaining.expected(step))
    return found


def test_the_minimum_at_first_and_then_as_many_as_have_passed() -> None:
    remaining = RemainingSteps()
    assert [remaining.expected(step) for step in (0, 50, MIN_REMAINING, MIN_REMAINING + 1)] == [
        MIN_REMAINING,
        MIN_REMAINING,
        MIN_REMAINING,
        MIN_REMAINING + 1,
    ]
    assert remaining.expected(10_000) == 10_000


def test_exact_for_a_linear_decay() -> None:
    """The learning rate rises until step 1000 and is zero at step 5000."""
    found = expected_steps(
        lambda step: min(step, 1000) * min(1, (5000 - step) / 4000), 4800, every=200
    )
    # A half is left after step 3000, a quarter after step 4000, and an eighth after step 4600.
    assert found[3000 // 200 - 2 : 3000 // 200] == [2800, 5000 - 3000]
    assert found[4000 // 200 - 2 : 4000 // 200] == [2000, 5000 - 4000]
    assert found[4600 // 200 - 1] == 600
    assert found[-1] == MIN_REMAINING


def test_after_a_decay_step_as_many_as_before_it() -> None:
    found = expected_steps(lambda step: 0.1 ** (step // 3000), 9000, every=1000)
    assert found == [1000, 2000, 3000, 3000, 3000, 3000, 3000, 3000, 3000]
    # If the lower rate lasts longer, its own steps count.
    assert expected_steps(lambda step: 1.0 if step < 300 else 0.1, 1000, every=100)[2:] == [
        *[300] * 4,
        400,
        500,
        600,
        700,
    ]


def test_frequent_decay_steps_keep_the_minimum() -> None:
    found = expected_steps(lambda step: 0.5 ** (step // 10), 100, every=10)
    assert found == [MIN_REMAINING] * 10


def test_a_small_decay_changes_nothing_and_a_rise_sets_a_new_peak() -> None:
    remaining = RemainingSteps()
    for step, rate in ((500, 0.1), (600, 0.08), (1000, 0.051)):
        remaining.learning_rate_changed(step, rate)
        assert remaining.expected(step) == step
    remaining.learning_rate_changed(1500, 0.4)
    # A decay from here would follow 500 steps at the peak.
    assert remaining.expected(1500) == 1500
    remaining.learning_rate_changed(2000, 0.2)
    assert remaining.expected(2000) == 500


def test_a_rise_that_was_not_reported_is_noticed_at_the_decay() -> None:
    remaining = RemainingSteps()
    remaining.learning_rate_changed(700, 0.05)
    remaining.learning_rate_changed(1000, 0.4, before=0.8)
    assert remaining.expected(1000) == 1000
    assert remaining.expected(2500) == 1500
