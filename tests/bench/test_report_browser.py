"""The page in a real browser: the script runs and the charts are drawn."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_runs import race, steps, train

from laconic.bench.records import Record
from laconic.bench.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


def dom(records: list[Record], folder: Path) -> str:
    assert CHROMIUM is not None
    write_report(records, folder / "report.html")
    address = (folder / "report.html").as_uri()
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}/profile", "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    return done.stdout


def assert_no_bad_numbers(page: str) -> None:
    drawn = page.partition('<script type="application/json"')[0]
    assert "NaN" not in drawn
    assert "Infinity" not in drawn


def test_charts_are_drawn(tmp_path: Path) -> None:
    page = dom([*race(), *steps()], tmp_path)
    assert "<title>Laconic report: mlp on synthetic digits" in page
    # Two charts of seven curves each; every curve is a path with a line in it.
    assert len(re.findall(r'<path d="M[^"]*L[^"]*"[^>]*class="curve"', page)) == 14
    assert page.count('class="name halo"') == 7 + 5 + 5
    assert page.count('class="key"') == 7
    assert_no_bad_numbers(page)


def test_odd_records_draw_without_a_fault(tmp_path: Path) -> None:
    run = train("sign", 356, 32)
    lone = replace(run, points=run.points[:1])
    flat = replace(run, spec="flat", points=tuple(replace(p, loss=0.0) for p in run.points))
    none = replace(run, spec="none", points=())
    page = dom([lone, flat, none], tmp_path)
    assert page.count("<figure") == 3
    assert page.count('role="img"') == 3
    assert_no_bad_numbers(page)
