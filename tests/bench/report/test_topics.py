"""The sections of the page on records other than runs."""

import re
from dataclasses import replace

import pytest

from gradwire.bench.records.schema import OtherRecord
from gradwire.bench.report.plotdata import Curves
from gradwire.bench.report.section import Section
from gradwire.bench.report.write import render, sections_of
from synthetic_others import (
    campaign,
    elastic,
    fault,
    follow,
    forecast,
    fuzz,
    guard,
    keras,
    levels,
    others,
)
from synthetic_runs import training_runs


def only(*records: OtherRecord) -> Section:
    [section] = sections_of(records)
    return section


def texts(section: Section) -> list[list[str]]:
    return [[cell.text for cell in row.cells] for row in section.grid.rows]


def test_every_kind_has_a_section_and_is_counted() -> None:
    page = render([*training_runs(), *others()])
    headings = " ".join(re.findall("<h2>(.*?)</h2>", page)).replace("\N{NO-BREAK SPACE}", " ")
    for words in (
        "mlp on synthetic digits",
        "Changing links: mlp, 4 workers, 1 Gbit/s, then 50 Mbit/s, then 1 Gbit/s",
        "Predicted steps: a small model, links of 1 Gbit/s and 0.1 ms",
        "Two levels of a sparsifier, factors 10 and 1000, on cpu, numba kernels",
        "Keras steps: hidden layers of 2,048, batch 32, 2 workers, links not shaped",
        "Cost of guards: mlp, 4 workers, links shaped to 1 Gbit/s",
        "Cost of integrations: layers of 1,024, 2 workers, cpu",
        "Fuzzed messages",
        "Jobs with injected faults",
        "Faults",
        "Replicas that are killed and join again",
    ):
        assert words in headings
    assert "27 records: 7 of kind train, 2 of kind follow, 4 of kind forecast, 2 of" in page


@pytest.mark.parametrize("record", others(), ids=lambda record: str(record.kind))
def test_one_record_alone_is_a_page(record: OtherRecord) -> None:
    assert "How this was measured" in render([record])


def test_two_level_selection_and_selecting_twice_are_compared() -> None:
    section = only(levels("topk", 1_000_000, 1.25), levels("randomk", 5_000_000, 0.96))
    columns = "method", "elements", "in two levels", "twice", "twice / two levels"
    assert section.grid.columns == columns
    assert texts(section) == [
        ["topk", "1,000,000", "2.00 ms", "2.50 ms", "1.25"],
        ["randomk", "5,000,000", "2.00 ms", "1.92 ms", "0.96"],
    ]
    assert section.summary.startswith("Selecting twice takes 0.96 to 1.25 times")
    graph = only(replace(levels("topk", 1_000_000, 1.25), by="graph"))
    assert texts(graph)[0][-1] == "CUDA graph"


def test_changing_links_are_a_chart_over_steps() -> None:
    controlled = follow("topk @ controller=autopilot", 180.0, "bf16")
    section = only(follow("none", 2000.0), controlled)
    [plot] = section.plots
    assert isinstance(plot, Curves)
    assert [(mark.x, mark.label) for mark in plot.marks] == [
        (0, "1 Gbit/s"),
        (40, "50 Mbit/s"),
        (80, "1 Gbit/s"),
    ]
    dense = plot.traces[0]
    assert dense.x == (0, 40, 40, 80, 80, 120)
    assert dense.y == (100, 100, 2000, 2000, 100, 100)
    assert texts(section)[4] == [
        "topk @ controller=autopilot",
        "50 Mbit/s",
        "180 ms",
        "7.20 s",
        "40",
        "40",
        "bf16",
    ]
    assert section.summary.startswith("topk @ controller=autopilot finished first, in 15.2 s.")
    page = render([follow("none", 2000.0), controlled])
    assert "<code>topk @ controller=autopilot</code>: 1 decision<" in page
    assert "as &lt;it&gt; is" in page
    assert "settled on" not in only(follow("none", 2000.0)).grid.columns


def test_the_summary_of_predictions_names_measurements() -> None:
    assert "nothing here was timed" in only(forecast("sign", 2), forecast("sign", 8)).summary
    known = only(forecast("sign", 2, 100.0), forecast("sign", 8, 120.0))
    assert known.summary == (
        "Half of 2 predictions are within 6% of the measured time, all within 10%."
    )
    [plot] = known.plots
    assert isinstance(plot, Curves)
    assert (plot.traces[0].x, plot.traces[0].y) == ((2, 8), (102, 108))
    assert only(forecast("sign", 2)).plots == ()


def test_guards_over_their_limit_are_highlighted() -> None:
    section = only(guard("topk:ratio=0.01", 1.01), guard("efsign", 1.05))
    assert [row[-1] for row in texts(section)] == ["within", "over"]
    assert [row.status for row in section.grid.rows] == ["done", "failed"]
    assert section.summary.startswith("1 of 2 measurements are within their limit")


def test_fuzzed_messages_are_one_row_per_run_and_per_crash() -> None:
    passed = only(fuzz("topk"), fuzz("topk:ratio=0.1 | sign"))
    assert texts(passed) == [["2 settings", "1", "8,000", "3,000", "5,000", "0", "3.00 s", "ok"]]
    assert passed.summary == (
        "Each of 8,000 malicious or corrupted messages to topk was decoded or refused."
    )
    crashed = [fuzz("topk"), fuzz("adaq", "adaq, call 0: IndexError()")]
    assert only(*crashed).summary.endswith("messages to 2 methods, 1 caused a crash.")
    assert [row[0] for row in texts(only(*crashed))] == ["2 settings", "adaq"]
    assert [row[-1] for row in texts(only(*crashed))] == ["crashed", "crashed"]
    assert '<pre class="error">adaq, call 0: IndexError()</pre>' in render(crashed)


def test_faults_are_counted_by_their_kind() -> None:
    jobs, faults = sections_of(
        [fault("wire", 1.5), fault("wire", -1, as_expected=False), campaign(3)]
    )
    assert texts(faults) == [["ddp", "kill in wire", "2", "1", "0", "1.50 s", "0"]]
    assert faults.summary == "2 faults: in 1 case a rank did not end as it should."
    assert texts(jobs)[0][-1] == "damaged"
    assert jobs.summary.startswith("0 of 1 jobs had no hang")


def test_jobs_of_replicas_that_were_killed_are_one_row_each() -> None:
    section = only(elastic("topk:ratio=0.01"), elastic("torchft", wrong_steps=2))
    assert [row[4:7] for row in texts(section)] == [["1.00 s", "1.50 s", "1,200"]] * 2
    assert [row[7::4] for row in texts(section)] == [["0", "ok"], ["2", "damaged"]]
    assert section.summary.startswith("1 of 2 jobs survived every kill")


def test_keras_steps_name_their_reference() -> None:
    section = only(keras("by hand", 50.0), keras("none", 55.0))
    assert texts(section)[1][:4] == ["none", "55.0 ms", "1.10", "by hand"]


def test_only_methods_have_a_colour() -> None:
    """A legend of 250 fuzzed settings would fill the page."""
    page = render([*training_runs(), fuzz("acpsgd"), guard("efsign", 1.0), levels("dgc", 10, 1.0)])
    methods = page.partition('id="data">')[2].partition('"plots"')[0]
    assert methods.count('"spec"') == len(training_runs())
    assert 'data-spec="efsign"' not in page


def test_many_names_are_counted() -> None:
    page = render([fuzz(f"method{i}") for i in range(250)])
    assert "<code>method11</code>, and 238 others</p>" in page
    assert "method12" not in page


def test_nothing_of_any_kind_becomes_markup() -> None:
    evil = "<img src=x onerror=alert(1)>"
    bad = [replace(record, spec=evil) for record in others() if record.kind != "fault"]
    page = render([*bad, replace(fault("wire", 1.0), phase=evil), fuzz(evil, evil)])
    assert "<img" not in page
    assert "&lt;img src=x" in page
