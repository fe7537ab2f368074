"""Runs the example of decentralised methods, in tiny settings, on real ranks."""

import pytest
from example_jobs import run_example

from processes import Ranks


@pytest.mark.parametrize("method", ["dsgd", "choco", "cgt", "beer"])
def test_workers_learn_classes_that_they_do_not_see(four_ranks: Ranks, method: str) -> None:
    for common, own, stats in four_ranks.run(run_example, "decentralized", method, "ring", 80, 64):
        assert common > 0.7
        # A worker alone could get three classes of ten.
        assert own > 0.4
        assert stats["syncs"] == 80
        assert stats["ratio"] > (0.7 if method == "dsgd" else 3)
