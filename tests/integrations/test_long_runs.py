"""Long runs on real ranks: no resource of a process grows, however often it is used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from long_jobs import (
    Held,
    attach_again_job,
    fresh_models_job,
    lost_group_job,
    several_models_job,
    steps_job,
    switch_job,
)

from processes import Ranks

GROWN_KB = 12_000
"""Bytes that an allocator may retain; a leak of a kilobyte per use would exceed it."""

pytestmark = pytest.mark.timeout(150)
PATIENCE_S = 140


def of_two(ranks: Ranks, job: Callable[..., Any], *args: object) -> list[Any]:
    """Returns the results of the first two ranks; the others have none."""
    results = ranks.run(job, *args, timeout_s=PATIENCE_S)
    assert results[2:] == [None, None]
    return results[:2]


def check_nothing_grew(before: Held, after: Held) -> None:
    assert after.files <= before.files
    # One communication thread may exist or not have ended yet.
    assert after.threads <= before.threads + 1
    assert after.groups == before.groups
    assert after.rss_kb < before.rss_kb + GROWN_KB


def test_attach_and_detach_a_thousand_times(four_ranks: Ranks) -> None:
    for before, after in of_two(four_ranks, attach_again_job, 1000):
        check_nothing_grew(before, after)


def test_switch_a_thousand_times(four_ranks: Ranks) -> None:
    for before, after, steps in of_two(four_ranks, switch_job, 1000):
        check_nothing_grew(before, after)
        assert steps == 50


@pytest.mark.parametrize("detach", [True, False], ids=["detached", "dropped"])
def test_a_hundred_models_one_after_the_other(four_ranks: Ranks, detach: bool) -> None:
    for before, after in of_two(four_ranks, fresh_models_job, 100, detach):
        check_nothing_grew(before, after)


def test_several_models_at_once(four_ranks: Ranks) -> None:
    for alone, together, runners in four_ranks.run(several_models_job):
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
        assert runners >= 3


def test_steps_of_real_ranks(four_ranks: Ranks) -> None:
    for before, after, times in of_two(four_ranks, steps_job, 1000):
        check_nothing_grew(before, after)
        # On a shared machine: the fastest of the last tenths against all others.
        assert min(times[5:]) < 3 * sorted(times)[5]


def test_a_group_in_which_a_collective_failed_is_not_reused(four_ranks: Ranks) -> None:
    """Its ranks may have run different collectives in it."""
    for reused, fresh in four_ranks.run(lost_group_job):
        assert reused
        assert fresh
