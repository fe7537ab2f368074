"""The comparison inside trainers runs and returns its rows; times are not checked."""

from gradwire.bench.microbench.integrations import Overhead
from gradwire.bench.microbench.trainers import compare
from processes import Ranks, as_torchrun


def job() -> list[Overhead]:
    as_torchrun()
    return compare(32, 3, 2)


def test_every_trainer_has_a_row(two_ranks: Ranks) -> None:
    rows = two_ranks.run(job)[0]
    assert [row.integration for row in rows] == ["accelerate", "lightning", "transformers"]
    for row in rows:
        assert row.plain_ms > 0
        assert row.compared == 2
        assert row.low <= row.ratio <= row.high
