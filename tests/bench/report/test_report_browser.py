"""The page in a real browser: the script runs, the charts are drawn, and clicks have effect."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import deadlines
from gradwire.bench.case import Change
from gradwire.bench.records.schema import AnyRecord
from gradwire.bench.report.write import write_report
from synthetic_others import fuzz, others
from synthetic_runs import scaled, steps, train, training_runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


MARK = "the driver is done"


def driver(name: str) -> str:
    return f"<script>{Path(__file__).with_name(name).read_text()}</script></body>"


def dom(records: Sequence[AnyRecord], folder: Path, script: str = "", *flags: str) -> str:
    """Returns the page after its script and ours; nothing else may be on the console."""
    path = folder / "report.html"
    write_report(records, path)
    path.write_text(path.read_text().replace("</body>", script or "</body>"))
    page, console = browse(path, "--dump-dom", *flags)
    assert [MARK in line for line in console] == [True] * bool(script), console
    return page


def browse(path: Path, *flags: str) -> tuple[str, list[str]]:
    """Returns the output of a browser, and the lines of its console."""
    assert CHROMIUM is not None
    place = [f"--user-data-dir={path.parent}/profile", "--enable-logging=stderr", *flags]
    command = [CHROMIUM, *FLAGS, *place, path.as_uri()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=deadlines.scaled(50), check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def facts(page: str) -> dict[str, dict[str, object]]:
    match = re.search(r'<output id="facts">(.*?)</output>', page)
    assert match is not None
    found: dict[str, dict[str, object]] = json.loads(match[1])
    return found


def assert_no_bad_numbers(page: str) -> None:
    drawn = page.partition('<script type="application/json"')[0]
    assert "NaN" not in drawn
    assert "Infinity" not in drawn


def test_charts_are_drawn(tmp_path: Path) -> None:
    page = dom([*training_runs(), *steps()], tmp_path)
    assert "<title>Gradwire report: mlp on synthetic digits" in page
    # Two charts of seven curves each; every curve is a path with a line in it.
    assert len(re.findall(r'<path d="M[^"]*L[^"]*"[^>]*class="curve"', page)) == 14
    assert page.count('class="name halo"') == 7 + 5 + 5
    assert page.count('<g class="dot') == 7 + 7
    assert page.count('class="frontier"') == 2
    assert page.count('class="key"') == 7
    assert_no_bad_numbers(page)


def test_unusual_records_are_drawn_without_errors(tmp_path: Path) -> None:
    run = train("sign", 356, 32)
    lone = replace(run, points=run.points[:1])
    flat = replace(run, spec="flat", points=tuple(replace(p, loss=0.0) for p in run.points))
    none = replace(run, spec="none", points=())
    page = dom([lone, flat, none], tmp_path)
    assert page.count("<figure") == 5
    assert page.count('role="img"') == 5
    assert_no_bad_numbers(page)


def test_a_click_sorts_the_table_and_another_filters_a_method(tmp_path: Path) -> None:
    """On the screen of a phone, which the page must not exceed."""
    page = dom([*scaled(), *steps()], tmp_path, driver("drive_report.js"), "--window-size=390,800")
    found = facts(page)
    assert found["before"] == {"rows": 7, "dots": 14, "curves": 21}
    assert found["filtered"] == {"rows": 6, "dots": 12, "curves": 18, "pressed": "false"}
    assert found["after"] == found["before"]
    shortest = ["408 ms", "462 ms", "482 ms", "572 ms", "712 ms", "3.23 s", "6.23 s"]
    assert found["up"] == shortest
    assert found["down"] == shortest[::-1]
    assert found["fits"] is True
    assert page.count("<figcaption>Scaling efficiency</figcaption>") == 1
    assert_no_bad_numbers(page)


def test_records_other_than_runs_are_drawn_and_sorted(tmp_path: Path) -> None:
    """On a phone: sorted and hidden like runs, but without colours if there is no chart."""
    records = [*others(), *training_runs(), *(fuzz(f"method{i}", "boom") for i in range(40))]
    page = dom(records, tmp_path, driver("drive_others.js"), "--window-size=390,800")
    found = facts(page)
    assert found["marks"] == ["1 Gbit/s", "50 Mbit/s", "1 Gbit/s"]
    # Dense is hidden by a click: one of two curves, and three of six rows.
    assert found["before"] == {"curves": 2, "rows": 6}
    assert found["after"] == {"curves": 1, "rows": 3}
    assert found["colours"] == 0
    assert found["up"] == ["0.96", "1.25"]
    assert found["down"] == ["1.25", "0.96"]
    assert found["fits"] is True
    assert found["legend"] is True
    assert_no_bad_numbers(page)


def test_a_long_name_does_not_widen_the_page(tmp_path: Path) -> None:
    long = "topk:ratio=0.1@controller=(gravac:low=10,high=1000,window=50,epsilon=0.7,omega=0.01)"
    run = replace(train(long, 286, 25), timeline=(Change(0, long, long),))
    page = dom(
        [*training_runs(), run], tmp_path, driver("drive_report.js"), "--window-size=390,800"
    )
    assert facts(page)["fits"] is True
    [name] = re.findall(r'class="name halo">([^<]*…[^<]*)<', page)
    head, _, tail = name.partition("…")
    assert len(name) > 30
    assert long.startswith(head)
    assert long.endswith(tail)


def test_charts_that_adapt_to_a_phone_are_no_error_to_the_browser(tmp_path: Path) -> None:
    """A screenshot is taken after a layout with other scroll bars, so charts are redrawn."""
    path, picture = tmp_path / "report.html", tmp_path / "page.png"
    write_report([*scaled(), *steps()], path)
    _, console = browse(path, "--window-size=390,3000", f"--screenshot={picture}")
    assert console == []
    assert picture.stat().st_size > 10_000
