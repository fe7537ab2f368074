"""The committed predictions from 2 to 1,024 workers: growth of the bytes by exchange."""

from pathlib import Path

import pytest

from gradwire.bench.predictions.forecast_records import read_predictions

COMMITTED = Path(__file__).parents[3] / "results" / "scaling.jsonl"
WORKERS = [2**power for power in range(1, 11)]


def sent_bytes(spec: str) -> list[float]:
    """Returns the bytes that one worker sends in a step, by the number of workers."""
    found = {r.workers: r.sent_bytes for r in read_predictions(COMMITTED) if r.spec == spec}
    return [found[workers] for workers in WORKERS]


@pytest.mark.parametrize(
    ("spec", "margin"),
    [("qsgd:bits=4", 0.01), ("efsign", 0.04), ("topk:ratio=0.01", 0.15)],
)
def test_a_sharded_exchange_stays_flat(spec: str, margin: float) -> None:
    """A worker sends two messages less its own shards, and a little for each shard's length."""
    sent = sent_bytes(f"{spec} @ exchange=sharded")
    messages = [own * n / (2 * (n - 1)) for own, n in zip(sent, WORKERS, strict=True)]
    assert max(messages) <= (1 + margin) * min(messages)


@pytest.mark.parametrize("spec", ["efsign", "topk:ratio=0.01"])
def test_a_gather_grows_with_the_workers(spec: str) -> None:
    sent = sent_bytes(f"{spec} @ exchange=gather")
    messages = [own / (n - 1) for own, n in zip(sent, WORKERS, strict=True)]
    assert messages == pytest.approx([messages[0]] * len(WORKERS), rel=0.01)
