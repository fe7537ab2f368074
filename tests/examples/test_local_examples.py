"""Runs the examples of local methods, in tiny settings, on real ranks."""

import pytest
from example_jobs import run_example

from processes import Ranks


@pytest.mark.parametrize("asynchronous", [False, True])
def test_qsparse(four_ranks: Ranks, asynchronous: bool) -> None:
    for accuracy, _, stats in four_ranks.run(run_example, "qsparse", 120, 64, asynchronous):
        assert accuracy > 0.8
        assert stats["syncs"] == 15
        assert stats["ratio"] > 100


@pytest.mark.parametrize("method", ["cser", "blocks", "csea", "cser-pl"])
def test_cser(four_ranks: Ranks, method: str) -> None:
    for accuracy, stats in four_ranks.run(run_example, "cser", method, 48, 128):
        assert accuracy > 0.8
        assert stats["ratio"] == pytest.approx(stats["planned_ratio"], rel=0.01)
        assert 25 < stats["ratio"] < 34


@pytest.mark.parametrize(("method", "ratio"), [("diloco", 10), ("sparseloco", 300)])
def test_diloco(four_ranks: Ranks, method: str, ratio: float) -> None:
    for loss, stats in four_ranks.run(run_example, "diloco", method, 40, 64, 10):
        assert loss < 5.3
        assert stats["syncs"] == 4
        assert stats["ratio"] >= 0.98 * ratio


@pytest.mark.parametrize("method", ["diloco", "sparseloco"])
def test_diloco_in_fragments(four_ranks: Ranks, method: str) -> None:
    for loss, stats in four_ranks.run(run_example, "diloco", method, 42, 64, 12, 3, 4):
        assert loss < 5.3
        assert stats["syncs"] == 10


@pytest.mark.parametrize(("method", "ratio"), [("diloco", 10), ("sparseloco", 100)])
def test_islands(four_ranks: Ranks, method: str, ratio: float) -> None:
    results = four_ranks.run(run_example, "islands", method, 30, 64, 10)
    for loss, _, stats in results:
        assert loss == results[0][0] < 5.4
        assert stats["syncs"] == 3
        assert stats["ratio"] >= 0.98 * ratio
        # With two islands a rank's message crosses the link between them once.
        assert stats["sent_bytes"] == stats["message_bytes"]
