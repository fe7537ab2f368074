"""The race of mounts in trainers runs, and says what it should; its times are not judged."""

from gradwire.bench.microbench.trainers import race
from processes import Ranks, as_torchrun


def job() -> list[dict[str, object]]:
    as_torchrun()
    return race(32, 3, 1)


def test_every_trainer_has_its_row(two_ranks: Ranks) -> None:
    rows = two_ranks.run(job)[0]
    assert [row["mount"] for row in rows] == ["accelerate", "lightning", "transformers"]
    for row in rows:
        assert row["plain_ms"] > 0
        assert row["ratio"] == row["none_ms"] / row["plain_ms"]
