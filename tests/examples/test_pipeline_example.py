"""Runs the example of pipeline stages in a tiny setting, on two and on four real ranks."""

from example_jobs import run_example

from processes import Ranks

SIZES = (4, 32, 16)


def test_pipeline_gpt_of_two_stages(two_ranks: Ranks) -> None:
    plain = two_ranks.run(run_example, "pipeline_gpt", "none", "none", 30, *SIZES)[1][0]
    results = two_ranks.run(run_example, "pipeline_gpt", "int4", "int8", 30, *SIZES)
    losses = results[1][0]
    assert len(losses) == 30
    assert losses[-1] < 0.9 * losses[0]
    assert abs(losses[-1] - plain[-1]) < 0.01 * plain[-1]
    for _, stats in results:
        assert stats["steps"] == 30
        assert stats["ratio"] > 3


def test_pipeline_gpt_of_four_stages_with_gravac(four_ranks: Ranks) -> None:
    args = ("int4", "int8", 12, *SIZES, "gravac")
    results = four_ranks.run(run_example, "pipeline_gpt", *args)
    assert [len(losses) for losses, _ in results] == [0, 0, 0, 12]
    for _, stats in results:
        assert stats["steps"] == 12
        assert stats["ratio"] > 0.9
