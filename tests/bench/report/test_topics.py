"""What the page says about records that are no runs."""

import re
from dataclasses import replace

import pytest

from gradwire.bench.records.schema import OtherRecord
from gradwire.bench.report.plotdata import Curves
from gradwire.bench.report.section import Section
from gradwire.bench.report.write import render, sections_of
from synthetic_others import chaos, follow, forecast, fuzz, guard, keras, kill, levels, others
from synthetic_runs import race


def only(*records: OtherRecord) -> Section:
    [section] = sections_of(records)
    return section


def texts(section: Section) -> list[list[str]]:
    return [[cell.text for cell in row.cells] for row in section.grid.rows]


def test_every_kind_has_its_place_and_is_counted() -> None:
    page = render([*race(), *others()])
    headings = " ".join(re.findall("<h2>(.*?)</h2>", page)).replace("\N{NO-BREAK SPACE}", " ")
    for words in (
        "mlp on synthetic digits",
        "Links that change: mlp, 4 workers, 1 Gbit/s, then 50 Mbit/s, then 1 Gbit/s",
        "Predicted steps: a small model, links of 1 Gbit/s and 0.1 ms",
        "Two levels of a sparsifier, factors 10 and 1000, on cpu, numba kernels",
        "Keras steps: hidden layers of 2,048, batch 32, 2 workers, links not shaped",
        "What guards cost: mlp, 4 workers, links shaped to 1 Gbit/s",
        "Hostile bytes",
        "Jobs whose workers were killed",
        "Kills",
    ):
        assert words in headings
    assert "24 records: 7 of kind train, 2 of kind follow, 4 of kind forecast, 2 of" in page


@pytest.mark.parametrize("record", others(), ids=lambda record: str(record.kind))
def test_one_record_alone_is_a_page(record: OtherRecord) -> None:
    assert "How this was measured" in render([record])


def test_both_ways_to_choose_and_their_ratio() -> None:
    section = only(levels("topk", 1_000_000, 1.25), levels("randomk", 5_000_000, 0.96))
    columns = "method", "elements", "in two levels", "twice", "twice / two levels"
    assert section.grid.columns == columns
    assert texts(section) == [
        ["topk", "1,000,000", "2.00 ms", "2.50 ms", "1.25"],
        ["randomk", "5,000,000", "2.00 ms", "1.92 ms", "0.96"],
    ]
    assert section.summary.startswith("Choosing twice takes 0.96 to 1.25 times")
    graph = only(replace(levels("topk", 1_000_000, 1.25), by="graph"))
    assert texts(graph)[0][-1] == "CUDA graph"


def test_links_that_change_are_a_chart_over_steps() -> None:
    steered = follow("topk @ controller=autopilot", 180.0, "bf16")
    section = only(follow("none", 2000.0), steered)
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
    assert section.summary.startswith("topk @ controller=autopilot was through first, in 15.2 s.")
    page = render([follow("none", 2000.0), steered])
    assert "<code>topk @ controller=autopilot</code>: 1 decision<" in page
    assert "as &lt;it&gt; is" in page
    assert "settled on" not in only(follow("none", 2000.0)).grid.columns


def test_predictions_say_whether_anything_was_timed() -> None:
    assert "nothing here was timed" in only(forecast("sign", 2), forecast("sign", 8)).summary
    known = only(forecast("sign", 2, 100.0), forecast("sign", 8, 120.0))
    assert known.summary == (
        "Half of 2 predictions are within 6% of what was measured, all within 10%."
    )
    [plot] = known.plots
    assert isinstance(plot, Curves)
    assert (plot.traces[0].x, plot.traces[0].y) == ((2, 8), (102, 108))
    assert only(forecast("sign", 2)).plots == ()


def test_guards_over_their_limit_stand_out() -> None:
    section = only(guard("topk:ratio=0.01", 1.01), guard("efsign", 1.05))
    assert [row[-1] for row in texts(section)] == ["within", "over"]
    assert [row.status for row in section.grid.rows] == ["done", "failed"]
    assert section.summary.startswith("1 of 2 measurements are within their limit")


def test_hostile_bytes_are_one_row_a_run_and_one_a_crash() -> None:
    sound = only(fuzz("topk"), fuzz("topk:ratio=0.1 | sign"))
    assert texts(sound) == [["2 settings", "1", "8,000", "3,000", "5,000", "0", "3.00 s", "sound"]]
    assert sound.summary == "Each of 8,000 hostile or broken messages to topk was read or refused."
    crashed = [fuzz("topk"), fuzz("adaq", "adaq, call 0: IndexError()")]
    assert only(*crashed).summary.endswith("messages to 2 methods, 1 made something crash.")
    assert [row[0] for row in texts(only(*crashed))] == ["2 settings", "adaq"]
    assert [row[-1] for row in texts(only(*crashed))] == ["crashed", "crashed"]
    assert '<pre class="error">adaq, call 0: IndexError()</pre>' in render(crashed)


def test_kills_are_counted_by_their_moment() -> None:
    jobs, kills = sections_of([kill("wire", 1.5), kill("wire", -1, ended=False), chaos(3)])
    assert texts(kills) == [["wire", "2", "1", "1.50 s", "0", "1"]]
    assert kills.summary == "2 kills: in 1 case the others did not all end with an error."
    assert texts(jobs)[0][-1] == "damaged"
    assert jobs.summary.startswith("0 of 1 came to the weights")


def test_keras_steps_stand_beside_what_they_are_compared_with() -> None:
    section = only(keras("by hand", 50.0), keras("none", 55.0))
    assert texts(section)[1][:4] == ["none", "55.0 ms", "1.10", "by hand"]


def test_only_methods_have_a_colour() -> None:
    """250 fuzzed settings in the legend would leave no room for the page."""
    page = render([*race(), fuzz("acpsgd"), guard("efsign", 1.0), levels("dgc", 10, 1.0)])
    methods = page.partition('id="data">')[2].partition('"plots"')[0]
    assert methods.count('"spec"') == len(race())
    assert 'data-spec="efsign"' not in page


def test_many_names_are_counted() -> None:
    page = render([fuzz(f"method{i}") for i in range(250)])
    assert "<code>method11</code>, and 238 others</p>" in page
    assert "method12" not in page


def test_nothing_of_any_kind_becomes_markup() -> None:
    evil = "<img src=x onerror=alert(1)>"
    bad = [replace(record, spec=evil) for record in others() if record.kind != "kill"]
    page = render([*bad, replace(kill("wire", 1.0), phase=evil), fuzz(evil, evil)])
    assert "<img" not in page
    assert "&lt;img src=x" in page
