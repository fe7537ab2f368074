"""Comparison at equal quality, and the verdict of the demo."""

from dataclasses import replace

from gradwire.bench.records.schema import Point, TrainRecord
from gradwire.bench.report.quality import equal_quality, quality_summary
from gradwire.bench.runs.demo import verdict
from synthetic_runs import failed, train

DENSE = [1.0, 0.6, 0.4, 0.3, 0.25]


def run(spec: str, step_s: float, losses: list[float]) -> TrainRecord:
    points = tuple(
        Point(step=n, time_s=n * step_s, loss=loss, sent_bytes=n) for n, loss in enumerate(losses)
    )
    return replace(train(spec, 100, 1), points=points, final_loss=losses[-1], target_loss=0.6)


def test_a_method_that_is_early_at_the_target_and_ends_worse_is_named() -> None:
    sparse = run("sign", 0.1, [1.0, 0.5, 0.4, 0.35, 0.35])
    good = run("powersgd:rank=4", 0.5, DENSE)
    found = equal_quality([run("ddp-fp32", 2, DENSE), sparse, good])
    assert found is not None
    assert (found.target.value, found.dense_s) == (0.25, 8)
    assert [(entry.spec, entry.time_s) for entry in found.reached] == [("powersgd:rank=4", 2.0)]
    assert found.missed == (("sign", 0.35),)


def test_one_seed_that_misses_is_a_method_that_misses() -> None:
    runs = [run("ddp-fp32", 2, DENSE), run("sign", 1, DENSE), run("sign", 1, [1.0, 0.9])]
    found = equal_quality(runs)
    assert found is not None
    assert not found.reached


def test_without_a_finished_dense_run_nothing_is_compared() -> None:
    dense = run("ddp-fp32", 2, DENSE)
    for status in ("failed", "interrupted", "diverged"):
        assert quality_summary([replace(dense, status=status), run("sign", 1, DENSE)]) is None
    assert quality_summary([dense]) is None


def test_the_verdict_of_the_demo_names_both_comparisons_and_what_failed() -> None:
    runs = [
        run("ddp-fp32", 2, DENSE),
        run("qsgd:bits=4", 0.5, DENSE),
        run("sign", 0.1, [1.0, 0.5, 0.35]),
        failed(train("efsign", 1, 1), "PeerError: rank 2 is gone\nwith details"),
    ]
    runs = [
        replace(r, target_loss=0.6, time_to_target_s=t)
        for r, t in zip(runs, (2.0, 0.5, 0.08, None), strict=True)
    ]
    lines = verdict(runs)
    assert lines[0].startswith("At equal loss: sign reached loss 0.6 first, in 80.0 ms")
    assert lines[1] == (
        "At equal quality (loss 0.250, where dense training ends after 8.00 s): "
        "qsgd:bits=4 4.00× as fast as dense; not reached by sign (ends at 0.350)."  # noqa: RUF001
    )
    assert lines[2] == "Failed: efsign: PeerError: rank 2 is gone"
