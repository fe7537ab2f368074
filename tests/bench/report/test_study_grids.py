"""Tables of a study: means over seeds, both baselines, and interrupted runs apart."""

from dataclasses import replace

from gradwire.bench.records.schema import BASELINE, Point, TrainRecord
from gradwire.bench.report.grid import Grid
from gradwire.bench.report.study_grids import COMPUTED, quality_grid, time_grid


def run(spec: str, seed: int, step_ms: float, metric: float, **others: object) -> TrainRecord:
    points = tuple(
        Point(step=n, time_s=n * step_ms / 1e3, loss=1.0, sent_bytes=n, metric=metric)
        for n in (0, 50, 100)
    )
    return replace(
        TrainRecord(
            spec=spec,
            workload="MLP",
            workload_spec="mlp",
            workers=8,
            rate="1gbit",
            shaped=True,
            seed=seed,
            status="done",
            command="",
            machine={},
            points=points,
            step_ms=step_ms,
            steps=100,
            final_loss=1.0,
            metric=metric,
            metric_name="accuracy",
            metric_better="higher",
            simulated=True,
        ),
        **others,  # type: ignore[arg-type]
    )


def cells(grid: Grid, row: int) -> dict[str, str]:
    return {n: c.text for n, c in zip(grid.columns, grid.rows[row].cells, strict=True)}


def test_quality_is_a_mean_over_seeds_and_counts_each_seed_once() -> None:
    runs = [run("efsign", seed, 10.0, metric) for seed, metric in ((0, 0.8), (1, 0.9), (2, 1.0))]
    # The same run at another rate is not a second sample.
    grid = quality_grid([*runs, replace(runs[0], rate="10gbit")])
    assert cells(grid, 0)["accuracy"] == "0.900 ± 0.100"
    assert (cells(grid, 0)["seeds"], cells(grid, 0)["steps"]) == ("3", "100")


def test_interrupted_runs_have_a_marked_row_of_their_own() -> None:
    late = run("efsign", 1, 10.0, 0.1, status="interrupted", steps=200)
    grid = quality_grid([run("efsign", 0, 10.0, 0.9, steps=100), late])
    assert [row.status for row in grid.rows] == ["done", "interrupted"]
    assert cells(grid, 0)["accuracy"] == "0.900"
    assert cells(grid, 1)["steps"] == "100 of 200"


def test_speed_ups_are_against_both_dense_runs() -> None:
    runs = [run(BASELINE, 0, 40.0, 0.9), run("torch-bf16", 0, 20.0, 0.9), run("int4", 0, 10.0, 0.9)]
    row = cells(time_grid(runs), 2)
    assert (row["speed-up on fp32"], row["on 16 bits"]) == ("4.00×", "2.00×")  # noqa: RUF001


def test_a_missing_baseline_in_16_bits_is_computed_and_marked() -> None:
    # 10 ms of computation and 40 ms on the wire in 45 ms: 5 ms overlap. With 20 ms it is 25 ms.
    dense = run(BASELINE, 0, 45.0, 0.9, compute_ms=10.0, wire_ms=40.0)
    grid = time_grid([dense, run("int4", 0, 12.5, 0.9)])
    assert cells(grid, 1)["on 16 bits, computed"] == "2.00×"  # noqa: RUF001
    assert cells(grid, 2)["method"] == COMPUTED
    assert cells(grid, 2)["step"] == "25.0 ms"


def test_a_target_that_one_seed_missed_has_no_time() -> None:
    goal = {"target_metric": 0.5}
    dense = run(BASELINE, 0, 40.0, 0.9, time_to_target_s=4.0, **goal)
    runs = [run("efsign", seed, 10.0, 0.9, **goal) for seed in (0, 1)]
    runs[0] = replace(runs[0], time_to_target_s=1.0)
    name = "time to accuracy 0.5"
    assert cells(time_grid([dense, *runs]), 1)[name] == "reached by 1 of 2"
    runs[1] = replace(runs[1], time_to_target_s=3.0)
    row = cells(time_grid([dense, *runs]), 1)
    assert row[name] == "2.00 ± 1.41 s"
    assert row["speed-up on fp32"] == "2.00×"  # noqa: RUF001
