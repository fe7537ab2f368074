"""Times at the best length of run: which length counts, and against which dense run."""

from dataclasses import replace

from test_study_grids import cells, run

from gradwire.bench import human
from gradwire.bench.records.schema import BASELINE, TrainRecord
from gradwire.bench.report.run_lengths import best_length_grid, longest
from gradwire.bench.report.tables import study_tables

TARGET = "accuracy=0.9"


def at(spec: str, seed: int, steps: int, reached_s: float | None) -> TrainRecord:
    return replace(
        run(spec, seed, 10.0, 0.9, target_metric=0.9, time_to_target_s=reached_s), steps=steps
    )


def test_the_fastest_length_that_all_seeds_reach_counts() -> None:
    runs = [
        at(BASELINE, 0, 100, 80.0),
        at(BASELINE, 0, 50, 40.0),
        at("int4", 0, 100, 20.0),
        at("int4", 1, 100, 24.0),
        # One seed of the short run does not come to the target.
        at("int4", 0, 50, 10.0),
        at("int4", 1, 50, None),
        at("topk:ratio=0.01", 0, 100, None),
        at("topk:ratio=0.01", 0, 50, None),
    ]
    grid = best_length_grid(runs)
    assert grid is not None
    dense, int4, topk = (cells(grid, row) for row in range(3))
    time = next(name for name in grid.columns if name.startswith("time to"))
    assert (dense["best length"], dense["speed-up on fp32"]) == ("50 steps", human.times(1.0))
    assert (int4["lengths"], int4["best length"], int4["seeds"]) == (
        "1 of 2 reach it",
        "100 steps",
        "2",
    )
    assert int4[time].startswith("22")
    # 40 s of the short dense run over 22 s.
    assert int4["speed-up on fp32"] == human.times(40 / 22)
    assert topk["lengths"] == "0 of 2 reach it"


def test_one_length_is_no_comparison_of_lengths() -> None:
    runs = [at(BASELINE, 0, 100, 80.0), at("int4", 0, 100, 20.0)]
    assert best_length_grid(runs) is None
    assert len(study_tables(runs)) == 2


def test_the_first_two_views_are_of_the_longest_runs() -> None:
    runs = [at("int4", 0, 100, 20.0), at("int4", 0, 50, 10.0)]
    assert longest(runs) == [runs[0]]
    assert len(study_tables(runs)) == 3
