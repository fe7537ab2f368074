"""How the time of a job becomes steps, with a clock that only the steps move."""

import math
from dataclasses import dataclass

import pytest

from gradwire.bench.worker.protocol import Job
from gradwire.bench.worker.time_budget import TimeBudget, equal_share

ROUNDS = 3


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def run(
    step_s: dict[str, float],
    budget_s: float | None,
    steps: int = 10,
    warmup: int = 3,
    period: int = 1,
    extra_s: float = 0.0,
) -> tuple[dict[str, list[int]], dict[str, list[int]], float]:
    """Returns warm-ups and timed steps of all blocks, by case, and the time of all together."""
    clock = Clock()
    case_order = tuple(step_s) * ROUNDS
    job = Job(workload="mlp", case_order=case_order, steps=steps, warmup=warmup, budget_s=budget_s)
    budget = TimeBudget(job, clock, agree=lambda value: value)
    warm_ups: dict[str, list[int]] = {case: [] for case in step_s}
    timed: dict[str, list[int]] = {case: [] for case in step_s}
    for index, case in enumerate(case_order):
        budget.begin_block()
        # The first block of a case also compiles.
        clock.now_s += extra_s if index < len(step_s) else 0.0
        warm_ups[case].append(budget.warm_ups(case, period))
        warm_up_s = [step_s[case]] * (warm_ups[case][-1] * period)
        clock.now_s += sum(warm_up_s)
        timed[case].append(budget.steps(case, period, warm_up_s))
        clock.now_s += timed[case][-1] * step_s[case]
        budget.end_block(case, [1e3 * step_s[case]] * timed[case][-1])
    return warm_ups, timed, clock.now_s - 100.0


def test_without_a_budget_every_block_has_its_steps() -> None:
    warm_ups, timed, _ = run({"slow": 100.0, "fast": 0.1}, None)
    assert timed == {"slow": [10] * 3, "fast": [10] * 3}
    assert warm_ups == {"slow": [3] * 3, "fast": [3] * 3}


def test_a_slow_case_takes_fewer_steps_and_a_fast_one_all() -> None:
    warm_ups, timed, took_s = run({"slow": 3.0, "fast": 0.1}, 60.0)
    assert timed["fast"] == [10] * 3
    assert 3 <= sum(timed["slow"]) < 30
    assert min(timed["slow"]) >= 1
    # The first warm-up is complete: methods may start dense.
    assert warm_ups["slow"][0] == 3
    assert all(1 <= count <= 3 for count in warm_ups["slow"][1:])
    assert took_s <= 60.0


def test_default_cases_at_100_mbit_end_in_time() -> None:
    """The step times of results/step.jsonl at 100 Mbit/s, on a machine that is twice as slow."""
    dense_s, half_s = 3.12, 1.56
    times = {"compute": 0.15, "ddp": dense_s, "torch-fp16": half_s, "torch-powersgd": 0.25}
    times |= {"none": dense_s, "fp16": 1.7, "efsign": 0.4, "qsgd": 0.66, "topk": 0.3}
    times |= {"randomk": 0.24, "powersgd": 0.2}
    _, timed, took_s = run(times, 240.0, extra_s=1.0)
    assert took_s <= 250.0
    assert all(sum(blocks) >= 7 for blocks in timed.values())
    assert sum(timed["topk"]) == 30


@pytest.mark.parametrize(
    ("needs", "share"),
    [
        ([math.inf, math.inf], 6.0),
        ([2.0, math.inf], 10.0),
        ([1.0, 5.0, 20.0], 6.0),
        ([2.0, 20.0, 20.0], 5.0),
        ([1.0, 3.0], 11.0),
        ([20.0], 12.0),
    ],
)
def test_needs_below_the_share_leave_more_to_others(needs: list[float], share: float) -> None:
    assert equal_share(12.0, needs) == share
    assert equal_share(-1.0, [math.inf]) == 0.0


def test_the_least_is_one_period_in_every_block() -> None:
    _, timed, _ = run({"slow": 1000.0}, 1.0)
    assert timed == {"slow": [1, 1, 1]}
    _, timed, _ = run({"slow": 1000.0}, 1.0, period=4)
    assert timed == {"slow": [4, 4, 4]}
    _, timed, _ = run({"slow": 1.0}, 60.0, steps=100, period=4)
    assert all(count % 4 == 0 for count in timed["slow"])


def test_steps_left_out_are_made_up_for() -> None:
    """Without a warm-up nothing is known of the first block."""
    _, timed, _ = run({"a": 0.1}, 600.0, warmup=0)
    assert timed == {"a": [1, 15, 14]}


def test_ranks_take_the_numbers_of_rank_0() -> None:
    job = Job(workload="mlp", case_order=("a",) * 2, steps=10, warmup=3, budget_s=1.0)
    budget = TimeBudget(job, Clock(), agree=lambda value: 7)
    budget.begin_block()
    assert budget.steps("a", 1, [5.0]) == 7
    budget.end_block("a", [1.0] * 7)
    assert budget.warm_ups("a", 1) == 7


@pytest.mark.parametrize("budget_s", [0.0, 1e-9])
def test_no_time_at_all_is_one_period(budget_s: float) -> None:
    assert run({"a": 0.1}, budget_s)[1] == {"a": [1, 1, 1]}
