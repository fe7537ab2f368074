"""The example and the benchmark run and return what they should; times are not checked."""

from named_jobs import NamedJobs


def test_the_example(keras_ranks: NamedJobs) -> None:
    for accuracy, stats in keras_ranks.run("example_job", "topk:ratio=0.05", 2, 256, 64):
        assert accuracy > 0.8
        assert stats["steps"] == 16
        assert stats["ratio"] > 5


def test_the_benchmark(keras_ranks: NamedJobs) -> None:
    rows = keras_ranks.run("timing_job", ["by-hand", "none", "topk:ratio=0.01"], 32, 2)[0]
    assert [row["spec"] for row in rows] == ["by-hand", "none", "topk:ratio=0.01"]
    for row in rows:
        assert row["ratio"] == row["step_ms"] / rows[0]["step_ms"]
    assert rows[1]["sent_bytes"] > 10 * rows[2]["sent_bytes"]
