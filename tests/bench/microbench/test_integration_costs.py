"""The race of mounts against no mounts runs, and says what it should; its times are not judged."""

from gradwire.bench.microbench.integrations import race
from processes import Ranks


def test_every_mount_has_its_row(four_ranks: Ranks) -> None:
    rows = four_ranks.run(race, 32, 3)[0]
    assert [row["mount"] for row in rows] == ["ddp", "loop", "fsdp"]
    for row in rows:
        assert row["plain_ms"] > 0
        assert row["ratio"] == row["none_ms"] / row["plain_ms"]
