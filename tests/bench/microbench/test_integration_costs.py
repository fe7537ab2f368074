"""The comparison of integrations runs and returns its rows; times are not checked."""

from gradwire.bench.microbench.integrations import compare
from processes import Ranks


def test_every_integration_has_a_row(four_ranks: Ranks) -> None:
    rows = four_ranks.run(compare, 32, 3)[0]
    assert [row["mount"] for row in rows] == ["ddp", "loop", "fsdp"]
    for row in rows:
        assert row["plain_ms"] > 0
        assert row["ratio"] == row["none_ms"] / row["plain_ms"]
