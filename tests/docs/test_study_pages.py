"""The pages of docs/results/ are those of the records, in every figure."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from gradwire.bench.records.schema import Point, TrainRecord
from gradwire.bench.report.study_facts import Facts, MissingRunError
from gradwire.bench.studies.claim import Claim
from gradwire.bench.studies.definitions import STUDIES
from gradwire.bench.studies.paper_tables import GRACE_TASKS
from gradwire.bench.studies.table_claims import TABLE_CLAIMS
from gradwire.errors import ConfigError
from pages import grace_page, study_pages
from pages.study_plot import (
    Curve,
    MethodsPlot,
    described_digest,
    digest,
    draw_factors,
    draw_methods,
)

ROOT = Path(__file__).parents[2]
FOLDER, RECORDS = ROOT / "docs" / "results", ROOT / "results"


@cache
def texts() -> dict[str, str]:
    return study_pages.texts(RECORDS)


def run(spec: str, seed: int = 0, metric: float = 0.9, step_ms: float = 10.0) -> TrainRecord:
    points = tuple(
        Point(step=step, time_s=step * step_ms / 1e3, sent_bytes=10 * step, loss=1, metric=value)
        for step, value in ((0, 0.1), (100, metric))
    )
    return TrainRecord(
        spec=spec,
        workload="digits",
        workload_spec="mlp",
        workers=8,
        rate="1gbit",
        shaped=True,
        seed=seed,
        status="done",
        command="gradwire study x",
        machine={},
        points=points,
        metric=metric,
        metric_name="accuracy",
        metric_better="higher",
        ratio=4.0,
        steps=100,
    )


def test_pages_and_plots_are_those_of_the_records() -> None:
    drawn = study_pages.plots(RECORDS)
    assert {path.name for path in study_pages.made(FOLDER)} == {*texts(), *drawn}
    for name, text in texts().items():
        assert (FOLDER / name).read_text("utf-8") == text, f"{name}: run make table"
    for name, data in drawn.items():
        found = described_digest((FOLDER / name).read_text("utf-8"))
        assert found == digest(data), f"{name}: run make table"


def test_every_file_of_records_is_on_a_page() -> None:
    pages = "".join(texts().values())
    for path in RECORDS.rglob("*.jsonl"):
        name = path.relative_to(RECORDS).as_posix()
        grace = path.stem in GRACE_TASKS
        assert grace or f"`results/{name}`" in pages, f"{name} is on no page: name its topic"


def test_every_study_with_records_has_a_claim_and_a_verdict() -> None:
    files = {path.stem for path in (RECORDS / "studies").glob("*.jsonl")}
    assert files <= {name.removesuffix(".md") for name in texts()} | set(GRACE_TASKS)
    for name in study_pages.decided(RECORDS):
        assert "**Not decided**" not in texts()[f"{name}.md"]


def test_verdicts_contain_no_figure_of_their_own() -> None:
    """Other records must change every result in a verdict, or contradict it."""
    for name, claim in study_pages.decided(RECORDS).items():
        runs = claim.records(STUDIES[name], study_pages.all_runs(RECORDS))
        facts = claim.facts(runs)
        changed = [
            replace(
                r,
                metric=r.metric and r.metric * 0.7,
                ratio=r.ratio and r.ratio * 3,
                points=tuple(
                    replace(p, metric=p.metric and p.metric * 0.7, time_s=p.time_s * 5)
                    for p in r.points
                ),
            )
            for r in facts.records
        ]
        assert claim.verdict(Facts(changed, claim.rate)) != claim.verdict(facts)


def test_a_verdict_that_the_records_contradict_is_refused() -> None:
    claim = Claim("t", "c", lambda f: f.end("efsign"), lambda f: f.metric("efsign") > f.metric())
    better, worse = (
        Facts([run("ddp-fp32"), run("efsign", metric=m)], "1gbit") for m in (0.95, 0.8)
    )
    assert claim.text("x", better) == "95.0 %"
    with pytest.raises(ConfigError, match="study x: the records contradict its verdict"):
        claim.text("x", worse)
    missing = claim.text("x", Facts([run("ddp-fp32")], "1gbit"))
    assert missing == "**Not decided**: no finished run of efsign at 1gbit."


def test_facts_are_means_over_seeds() -> None:
    runs = [run("ddp-fp32", step_ms=40), *(run("efsign", s, m) for s, m in ((0, 0.9), (1, 0.92)))]
    facts = Facts(runs, "1gbit")
    assert facts.end("efsign") == "91.0 ± 1.4 %"
    assert facts.speed("efsign") == pytest.approx(4)
    assert facts.seconds("efsign", 0.91) is None
    assert facts.seconds("efsign", 0.5) == pytest.approx(0.493, abs=0.01)
    with pytest.raises(MissingRunError, match="no finished run of topk at 1gbit"):
        facts.metric("topk")


def test_grace_without_records_says_that_it_has_not_run() -> None:
    text = grace_page.page(RECORDS, [])
    assert "Not run: `grace-neumf`." in text
    assert "| not run | `grace-lstm` |" in text
    assert "reproduced |" not in text


def test_a_task_of_grace_is_drawn_and_decided_once_it_has_records() -> None:
    study = STUDIES["grace-neumf"]
    own = [
        replace(
            run(spec, metric=0.6 if spec == "ddp-fp32" else 0.3, step_ms=90 if index else 300),
            workload_spec=study.workload,
            steps=study.steps,
            rate=rate,
        )
        for index, spec in enumerate(study.cases)
        for rate in study.rates
    ]
    assert set(grace_page.plots(own)) == {"grace-neumf.svg"}
    text = grace_page.page(RECORDS, own)
    assert "costs 12 points of hit rate (83 for 95 %) | reproduced | dense 60.0 %;" in text


def test_drawings_carry_their_digest_and_no_colour_of_the_page() -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    plot = study_pages.methods_plot([run("ddp-fp32", step_ms=40), run("efsign"), run("efsign", 1)])
    assert isinstance(plot, MethodsPlot)
    assert plot.methods[1].speed == {"1 Gbit/s": 4}
    curves = (Curve("gravac", (0, 10), (1.0, 100.0), 50),)
    for drawn, svg in ((plot, draw_methods(plot, "t")), (curves, draw_factors(curves, "t"))):
        assert described_digest(svg) == digest(drawn)
        assert "#000000" not in svg
        assert "<metadata" not in svg


@pytest.mark.parametrize("name", sorted(TABLE_CLAIMS))
def test_a_table_of_a_paper_is_decided_once_it_has_records(name: str) -> None:
    """Which word the verdict has depends on the records, so any records give one."""
    study, claim = STUDIES[name], TABLE_CLAIMS[name]
    own = [
        replace(
            run(spec, metric=0.9 if spec == "ddp-fp32" else metric, step_ms=50),
            workload_spec=form.workload,
            steps=study.steps,
            workers=study.workers,
        )
        for form, metric in zip(study.by_learning_rate(), (0.7, 0.8, 0.75, 0.6), strict=False)
        for spec in study.cases
    ]
    chosen = claim.records(study, own)
    assert len(chosen) == len(study.cases)
    best = "80.0 %" if study.learning_rates else "70.0 %"
    assert best in claim.text(name, claim.facts(chosen))


def test_floats_are_counted_over_all_steps() -> None:
    curve = Curve("gravac", (0, 50), (1.0, 100.0), 100)
    assert study_pages.mean_factor(curve) == pytest.approx(100 / 50.5)
