"""The comparison inside trainers runs and returns its rows; times are not checked."""

from gradwire.bench.microbench.trainers import compare
from processes import Ranks, as_torchrun


def job() -> list[dict[str, object]]:
    as_torchrun()
    return compare(32, 3, 1)


def test_every_trainer_has_a_row(two_ranks: Ranks) -> None:
    rows = two_ranks.run(job)[0]
    assert [row["mount"] for row in rows] == ["accelerate", "lightning", "transformers"]
    for row in rows:
        assert row["plain_ms"] > 0
        assert row["ratio"] == row["none_ms"] / row["plain_ms"]
