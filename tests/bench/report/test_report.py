import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gradwire.bench.case import Change
from gradwire.bench.records.schema import Record
from gradwire.bench.report.plotdata import Bars, Dots
from gradwire.bench.report.plots import plots
from gradwire.bench.report.summary import NOT_SHAPED, train_summary
from gradwire.bench.report.tables import step_tables, train_tables
from gradwire.bench.report.write import render, write_report
from gradwire.errors import ConfigError
from synthetic_runs import failed, scaled, steps, train, training_runs


class Loads(HTMLParser):
    """Collects every address that a browser would fetch, and all tags."""

    def __init__(self) -> None:
        HTMLParser.__init__(self)
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "srcset", "data"} and value is not None:
                self.addresses.append(value)


def page_data(page: str) -> dict[str, list[dict[str, object]]]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert match is not None
    data: dict[str, list[dict[str, object]]] = json.loads(match[1])
    return data


def test_the_page_names_every_method_and_command(tmp_path: Path) -> None:
    records: list[Record] = [*training_runs(), *steps()]
    write_report(records, tmp_path / "new" / "report.html")
    page = (tmp_path / "new" / "report.html").read_text()
    for record in records:
        assert f'data-spec="{record.spec}"' in page
        assert f"<pre>{record.command}</pre>" in page
    assert "Imaginary 9000" in page


def test_the_page_loads_nothing() -> None:
    page = render([*training_runs(), *steps()])
    found = Loads()
    found.feed(page)
    assert all(address.startswith(("#", "data:,")) for address in found.addresses)
    assert not re.search(r"https?://|@import|url\((?!#)", page)


def test_the_data_is_json_with_every_plot() -> None:
    data = page_data(render([*training_runs(), *steps()]))
    assert [plot["title"] for plot in data["plots"]] == [
        "Final accuracy against time",
        "Final accuracy against bytes",
        "Loss against time",
        "Loss against bytes sent",
        "Where a step’s time goes",  # noqa: RUF001
        "Step time",
        "Where a step’s time goes",  # noqa: RUF001
    ]
    assert data["methods"][0] == {"spec": "ddp-fp32", "baseline": True, "order": 0}


def test_nothing_in_a_record_becomes_markup() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{data}} ]]>"
    run = replace(train(evil, 286, 25), workload=evil, command=evil, machine={evil: evil})
    harmless = replace(train("sign", 286, 25), machine={"cpu": "one"})
    page = render([failed(run, evil), run])
    plain, attacked = Loads(), Loads()
    plain.feed(render([failed(harmless, "e"), harmless]))
    attacked.feed(page)
    assert attacked.tags == plain.tags
    assert page_data(page)["methods"][0]["spec"] == evil


def test_no_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to report"):
        write_report([], tmp_path / "report.html")


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the report to"):
        write_report(training_runs(), tmp_path)


def test_failed_and_diverged_runs_are_shown() -> None:
    lost = replace(train("qsgd:bits=2", 300, 16), status="diverged", final_loss=float("nan"))
    nan_points = tuple(replace(p, loss=float("nan")) for p in lost.points)
    page = render(
        [*training_runs(), failed(lost, "PeerError: gone"), replace(lost, points=nan_points)]
    )
    assert "PeerError: gone" in page
    assert "Not finished: qsgd:bits=2 failed, qsgd:bits=2 diverged." in page


def test_summary_names_the_winner_and_its_gain() -> None:
    assert train_summary(training_runs()) == (
        "powersgd:rank=4 reached loss 0.35 first, in 26.8 s: "
        "11.4× as fast as dense (ddp-fp32, 5 min 05 s)."  # noqa: RUF001
    )


def test_summary_is_honest_when_compression_loses() -> None:
    records = [train("ddp-fp32", 100, 1), train("sign", 150, 32, 1.25)]
    assert train_summary(records).startswith("Compression did not pay here: dense (ddp-fp32)")
    same = [train("ddp-fp32", 100, 1), train("sign", 99, 32)]
    assert train_summary(same).startswith("Compression made no difference here")


def test_summary_names_limitations() -> None:
    loose = [replace(record, shaped=False, rate=None) for record in training_runs()]
    assert NOT_SHAPED in train_summary(loose)
    assert "no dense run (ddp-fp32)" in train_summary(training_runs()[1:])
    never = [replace(record, time_to_target_s=None) for record in training_runs()]
    assert train_summary(never) == "No method reached loss 0.35."


def test_a_method_that_missed_the_target_once_does_not_win() -> None:
    unlucky = replace(train("powersgd:rank=4", 231, 97), seed=1, time_to_target_s=None)
    assert train_summary([*training_runs(), unlucky]).startswith(
        "topk:ratio=0.01 | qsgd:bits=4 reached"
    )


def test_settings_are_not_mixed() -> None:
    slow = [replace(record, rate="10mbit") for record in training_runs()]
    data = page_data(render([*training_runs(), *slow]))
    assert [plot["title"] for plot in data["plots"]].count("Loss against time") == 2


def test_parts_of_a_step_add_up() -> None:
    breakdown = plots(training_runs())[-1]
    assert breakdown.kind == "bars"
    for bar in breakdown.traces:
        assert sum(part.value for part in bar.segments) == pytest.approx(bar.total)


def test_the_frontier_is_the_pareto_front() -> None:
    runs = scaled()[:7]
    by_time, by_bytes = (plot for plot in plots(runs) if isinstance(plot, Dots))
    # In order of cost, each better than all before it; the best of all is among them.
    for plot in (by_time, by_bytes):
        assert [dot.x for dot in plot.traces] == sorted(dot.x for dot in plot.traces)
        best = [dot.y for dot in plot.traces if dot.best]
        assert best == sorted(best)
        assert best[-1] == max(run.metric or 0 for run in runs)
    assert [dot.spec for dot in by_bytes.traces if dot.best] == [
        "torch-powersgd:rank=1",
        "powersgd:rank=4",
        "topk:ratio=0.01 | qsgd:bits=4",
        "sign",
        "torch-fp16",
        "ddp-fp32",
    ]


def test_less_is_better_for_some_metrics() -> None:
    words = {"metric_name": "perplexity", "metric_better": "lower"}
    runs = [
        replace(train("ddp-fp32", 300, 1), metric=90.0, **words),
        replace(train("sign", 100, 32), metric=95.0, **words),
        replace(train("none", 200, 1), metric=99.0, **words),
    ]
    dots = plots(runs)[0]
    assert isinstance(dots, Dots)
    assert {dot.spec: dot.best for dot in dots.traces} == {
        "sign": True,
        "none": False,
        "ddp-fp32": True,
    }


def test_seeds_of_a_method_are_one_dot_with_a_range() -> None:
    second = [replace(r, seed=1, metric=0.95) for r in training_runs()]
    dots = plots([*training_runs(), *second])[0]
    assert isinstance(dots, Dots)
    assert {(dot.low, dot.y, dot.high) for dot in dots.traces} == {(0.95, 0.96, 0.97)}


def test_a_run_without_communication_is_not_compared() -> None:
    alone = replace(failed(train("compute-only", 50, 1), ""), status="done", error=None)
    alone = replace(alone, step_ms=50.0, target_loss=None, metric_name=None)
    assert train_summary([*training_runs(), alone]) == train_summary(training_runs())
    no_target = [replace(r, target_loss=None) for r in (*training_runs(), alone)]
    assert train_summary(no_target).startswith("torch-powersgd:rank=1 has the shortest step")
    first = plots([*training_runs(), alone])[0]
    assert "compute-only" not in {trace.spec for trace in first.traces}
    assert "compute-only" in render([*training_runs(), alone])


def test_a_metric_can_be_the_target() -> None:
    goal = {"target_loss": None, "target_metric": 0.9, "metric_better": "higher"}
    runs = [replace(record, **goal) for record in training_runs()]
    assert "reached accuracy 0.9 first" in train_summary(runs)
    [table] = train_tables(runs)
    assert any(str(column.header) == "time to\naccuracy 0.9" for column in table.columns)


def test_scaling_is_shown_where_there_are_several_numbers_of_workers() -> None:
    page = render(scaled()).replace("\N{NO-BREAK SPACE}", " ")
    assert "mlp on synthetic digits from 2 to 8 workers, links shaped to 100 Mbit/s" in page
    best = "torch-powersgd:rank=1 has the highest throughput, 6% of 8 times one worker."
    assert f"With 8 workers {best}" in page
    titles = [plot["title"] for plot in page_data(page)["plots"]]
    assert titles[-2:] == ["Scaling efficiency", "Throughput"]
    alone = [plot["title"] for plot in page_data(render(scaled()[:7]))["plots"]]
    assert "Scaling efficiency" not in alone


def test_the_step_without_communication_is_part_of_the_breakdown() -> None:
    breakdown = plots(scaled()[:7])[-1]
    assert isinstance(breakdown, Bars)
    dense, ours = (next(b for b in breakdown.traces if b.spec == s) for s in ("ddp-fp32", "sign"))
    assert [part.name for part in dense.segments] == ["compute", "not split"]
    assert [part.name for part in ours.segments] == ["compute", "encode", "wire", "decode", "rest"]
    assert "The rest is waiting" in breakdown.caption


def test_the_bytes_counted_by_the_interfaces_are_reported() -> None:
    sentence = "The interfaces counted at most 2.0% more bytes than the methods."
    assert sentence in train_summary(scaled()[:7])
    assert "interfaces" not in train_summary(training_runs())
    fewer = [replace(run, interface_bytes=0.75 * run.sent_bytes) for run in scaled()[:7]]
    assert "The interfaces counted at least 25.0% fewer bytes than" in train_summary(fewer)


def test_tables_fit_a_narrow_terminal() -> None:
    console = Console(width=80, record=True, file=StringIO())
    for table in [
        *train_tables([*training_runs(), failed(training_runs()[0], "x")]),
        *step_tables(steps()),
    ]:
        console.print(table)
    text = console.export_text()
    for number in ("3.12 s", "35.0 MB", "388×", "5 min 05 s", "11.4×", "not reached"):  # noqa: RUF001
        assert number in text


def test_the_decisions_of_controllers_are_shown() -> None:
    led = replace(
        train("topk:ratio=0.1 @ controller=autopilot", 100, 10),
        timeline=(Change(0, "topk:ratio=0.1", "as it is"), Change(1200, "bf16", "<fast> link")),
    )
    page = render([train("ddp-fp32", 300, 1), led])
    assert page.count("Decisions of the controllers") == 1
    assert "<td>1,200</td><td>bf16</td><td>&lt;fast&gt; link</td>" in page
    assert "2 decisions" in page
    assert "Decisions of the controllers" not in render([train("ddp-fp32", 300, 1)])
