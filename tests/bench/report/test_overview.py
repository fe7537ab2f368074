"""The overview of a long page: a table, folded groups, counts, and headings that differ."""

import re
from collections import Counter
from dataclasses import replace

from gradwire.bench.records.schema import AnyRecord
from gradwire.bench.report.summary import gain_over_dense, step_summary
from gradwire.bench.report.write import render
from synthetic_others import others
from synthetic_runs import scaled, steps, training_runs


def many() -> list[AnyRecord]:
    interrupted = [replace(r, workload="mlp", status="interrupted") for r in steps()]
    return [*training_runs(), *scaled(), *steps(), *interrupted, *others(), *others()]


def test_a_long_page_is_a_table_and_folded_groups() -> None:
    page = render(many())
    groups = re.findall(r'<details class="group" id="(g\d+)">', page)
    assert len(groups) > 5
    table = page.split('<table class="overview">')[1].split("</table>")[0]
    assert re.findall(r'href="#(g\d+)"', table) == groups
    assert re.search(r"Step times: mlp</a></td><td>–</td><td>1</td><td>5</td><td>5</td>", table)  # noqa: RUF001
    # Every section is inside of a group, once, and linked from its list.
    sections = re.findall(r'<section id="(s\d+)">', page)
    assert all(f'href="#{name}"' in page for name in sections)
    assert page.count("<details") == page.count("</details>")


def test_no_two_headings_are_alike() -> None:
    headings = Counter(re.findall(r"<h\d>(.*?)</h\d>", render(many())))
    assert len(headings) > 10
    assert set(headings.values()) == {1}


def test_a_short_page_is_not_folded() -> None:
    page = render(training_runs())
    assert 'class="group"' not in page
    assert 'class="lead"' in page


def test_interrupted_runs_are_counted_and_failed_ones_named() -> None:
    runs = [replace(r, status="interrupted") for r in steps()[1:]]
    failed = replace(steps()[1], spec="sign", status="failed")
    text = step_summary([steps()[0], *runs, failed])
    assert "Not finished: sign failed. 4 of 6 runs were interrupted." in text


def test_no_winner_is_named_among_interrupted_runs() -> None:
    dense, half, *_ = steps()
    cut = [replace(run, status="interrupted", step_ms=1.0) for run in steps()[2:]]
    assert step_summary([dense, half, *cut]).startswith(step_summary([dense, half]))
    alone = step_summary(cut)
    assert alone.startswith("No compressed run was finished, so no method is named the fastest.")
    assert f"{len(cut)} of {len(cut)} runs were interrupted." in alone
    no_dense = step_summary([replace(dense, status="interrupted"), half])
    assert f"the dense run ({dense.spec}) was interrupted" in no_dense


def test_the_gain_leaves_out_runs_that_were_interrupted() -> None:
    dense, half, *rest = steps()
    fast = [replace(r, status="interrupted") for r in rest]
    assert gain_over_dense([dense, half, *fast]) == 366 / 237
    assert gain_over_dense([half, *fast]) is None
