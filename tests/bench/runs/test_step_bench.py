"""`bench step`: bounds of a step, and rows with fewer steps than asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from scripted_cluster import ScriptedCluster, finished

from gradwire.bench.records.files import read
from gradwire.bench.records.schema import StepRecord
from gradwire.bench.report.grid import step_grid
from gradwire.bench.report.summary import step_summary
from gradwire.bench.report.tables import step_tables
from gradwire.bench.report.write import render
from gradwire.bench.runs import cluster_run
from gradwire.bench.runs.cluster_run import Provenance
from gradwire.bench.runs.step import ROUNDS, StepBench, StepCollector
from gradwire.bench.worker.protocol import Finished, Job, Message, Started
from gradwire.errors import ConfigError
from gradwire.testbed.cluster import LoopbackCluster


def block(case: str, step_ms: float, sent: float, share: float, steps: int = 4) -> Finished:
    message = finished(case, (step_ms,) * steps)
    return replace(message, sent_bytes=sent, exposed_share=share)


def collected(provenance: Provenance, *messages: Finished) -> list[StepRecord]:
    collector = StepCollector(provenance, batch=4, parameters=7, rounds=1, steps_asked=4)
    records = [collector.receive(message) for message in messages]
    return [record for record in records if isinstance(record, StepRecord)]


SHAPED = Provenance(4, "100mbit", True, "test", {})


def test_a_record_has_the_bound_of_its_bytes() -> None:
    alone, dense, sparse = collected(
        SHAPED,
        block("compute-only", 50.0, 0.0, 1.0),
        block("ddp-fp32", 1000.0, 1e7, 0.25),
        replace(block("topk:ratio=0.01", 90.0, 1e5, 0.5), received_bytes=2e5),
    )
    assert (alone.bound_wire_ms, alone.bound_ms, alone.ratio_to_bound) == (0.0, 50.0, 1.0)
    assert dense.bound_wire_ms == dense.bound_ms == pytest.approx(800.0)
    assert dense.ratio_to_bound == pytest.approx(1.25)
    # It receives twice as much as it sends, half of that after the backward pass.
    assert sparse.bound_wire_ms == pytest.approx(16.0)
    assert sparse.exposed_bytes == pytest.approx(1e5)
    assert sparse.bound_ms == pytest.approx(58.0)
    text = tables_text([alone, dense, sparse])
    for words in ("wire at", "bound", "step /", "800 ms", "58.0 ms", "1.25", "1.55"):
        assert words in text
    columns = step_grid([alone, dense, sparse]).columns
    assert {"wire at rate", "bound", "step / bound"} <= {*columns}


@pytest.mark.parametrize(
    "provenance", [replace(SHAPED, shaped=False), replace(SHAPED, rate=None, shaped=False)]
)
def test_links_without_a_rate_have_no_bounds(provenance: Provenance) -> None:
    records = collected(
        provenance, block("compute-only", 50.0, 0.0, 1.0), block("none", 60.0, 1e6, 1.0)
    )
    assert {(r.bound_wire_ms, r.bound_ms, r.ratio_to_bound) for r in records} == {(None,) * 3}
    assert "bound" not in tables_text(records)


def tables_text(records: list[StepRecord]) -> str:
    console = Console(width=80, record=True, file=StringIO())
    for table in step_tables(records):
        console.print(table)
    return console.export_text()


def test_rows_with_fewer_steps_are_marked() -> None:
    records = collected(
        SHAPED,
        block("compute-only", 50.0, 0.0, 1.0),
        block("ddp-fp32", 1000.0, 1e7, 0.25, steps=3),
    )
    assert [(r.steps, r.steps_asked) for r in records] == [(4, 4), (3, 4)]
    assert "3 of 4" in tables_text(records)
    sentence = "Slow cases took fewer steps than asked: ddp-fp32 3 of 4."
    assert sentence in step_summary(records)
    page = render(records)
    assert "3 of 4" in page
    assert "step / bound" in page
    assert "asked" not in step_summary(records[:1])
    assert "of 4" not in tables_text(records[:1])


def test_bounds_fit_a_narrow_terminal() -> None:
    dense = block("ddp-fp32", 3117.0, 35e6, 0.25, steps=3)
    ours = replace(
        block("topk:ratio=0.01", 123.4, 1e5, 0.5), encode_ms=123.4, wire_ms=123.4, decode_ms=123.4
    )
    text = tables_text(collected(SHAPED, block("compute-only", 50.0, 0.0, 1.0), dense, ours))
    for number in ("3.12 s", "35.0 MB", "25.3×", "3 of 4", "2.80 s", "1.11", "41%"):  # noqa: RUF001
        assert number in text
    assert "…" not in text


@contextmanager
def loopback(workers: int, rate: str | None) -> Iterator[LoopbackCluster]:
    yield LoopbackCluster(workers)


def bench(path: Path | None, rate: str | None, budget_s: float | None) -> StepBench:
    cases = ("none", "topk:ratio=0.1")
    return StepBench(cases, 2, rate, 30, 1, None, path, "c", "mlp-tiny", budget_s=budget_s)


def test_a_run_out_of_time_ends_with_one_step_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_run, "open_cluster", loopback)
    path, console = tmp_path / "runs.jsonl", Console(width=100, record=True, file=StringIO())
    assert bench(path, None, 1e-3).run(console) == "done"
    records = [record for record in read([path]) if isinstance(record, StepRecord)]
    assert [(r.spec, r.status, r.steps, r.steps_asked) for r in records] == [
        ("none", "done", ROUNDS, 30),
        ("topk:ratio=0.1", "done", ROUNDS, 30),
    ]
    # 32 and 64 KiB of weights fit into one bucket.
    assert all(r.exposed_bytes == r.sent_bytes for r in records)
    assert "topk:ratio=0.1 3 of 30" in console.export_text()


def test_links_with_a_rate_imply_the_case_that_bounds_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_well(job: Job) -> Iterator[Message]:
        for case in job.case_order:
            yield Started(case=case)
            yield finished(case)

    cluster = ScriptedCluster([all_well, all_well], note=None)
    monkeypatch.setattr(cluster_run, "open_cluster", cluster.open)
    console = Console(width=100, file=StringIO())
    bench(None, "1gbit", 240.0).run(console)
    bench(None, None, 240.0).run(console)
    shaped, plain = (job.case_order for job in cluster.jobs)
    assert shaped == ("compute-only", "none", "topk:ratio=0.1") * ROUNDS
    assert plain == ("none", "topk:ratio=0.1") * ROUNDS
    assert cluster.jobs[0].budget_s == pytest.approx(240.0, abs=1.0)


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("inf"), float("nan")])
def test_the_time_must_be_positive(minutes: float) -> None:
    with pytest.raises(ConfigError, match="step: minutes must be positive and finite, got"):
        bench(None, None, 60 * minutes).run(Console(file=StringIO()))
