"""Reference pages agree with the code, and their examples run."""

import doctest
import re
from dataclasses import fields
from pathlib import Path

import pytest
from stats_jobs import handle_keys, local_keys, setting_keys
from typer.testing import CliRunner

from gradwire.bench.records import schema
from gradwire.bench.studies.definitions import STUDIES
from gradwire.bench.studies.paper_tables import GRACE_TASKS
from gradwire.cli import app
from pages import cli, method_results, paper_studies, records_format, spec_names, versions
from processes import Ranks

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


@pytest.mark.parametrize("page", ["api", "spec", "stats"])
def test_the_examples_of_a_page_run(page: str) -> None:
    found = doctest.testfile(str(REFERENCE / f"{page}.md"), module_relative=False)
    assert found.attempted >= 7
    assert found.failed == 0


def stats_keys(title: str) -> set[str]:
    """Returns the keys in the tables of a section of the page about statistics."""
    text = (REFERENCE / "stats.md").read_text("utf-8").split(f"\n## {title}\n")[1]
    rows = re.findall(r"^\| (`[^|]*) \|", text.partition("\n## ")[0], flags=re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


ASYNC = {
    "reconnects",
    "lost_workers",
    "rejoined_workers",
    "refused_updates",
    "refused_connections",
}


def test_the_page_of_statistics_has_the_keys_of_real_runs(two_ranks: Ranks) -> None:
    stats, policy, metrics = two_ranks.run(handle_keys)[0]
    with_settings = two_ranks.run(setting_keys)[0]
    local, local_metrics = two_ranks.run(local_keys, False)[0]
    asynchronous, _ = two_ranks.run(local_keys, True)[0]
    assert stats_keys("stats()") == stats | with_settings | local
    assert stats_keys("metrics()") == metrics | local_metrics
    assert asynchronous - local == ASYNC
    page = (REFERENCE / "stats.md").read_text("utf-8")
    assert all(f"`{key}`" in page for key in policy | ASYNC)


def test_every_command_and_option_is_on_the_page() -> None:
    page = cli.page()
    sections = dict(re.findall(r"^## (gradwire [a-z ]+)\n\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    assert len(sections) >= 17
    for words, section in sections.items():
        done = CliRunner().invoke(app, [*words.split()[1:], "--help"], env={"COLUMNS": "200"})
        options = set(re.findall(r"(?<![\w-])(--[a-z][\w-]*)", done.stdout)) - {"--help"}
        table = "".join(line for line in section.splitlines() if line.startswith("| `"))
        assert options <= set(re.findall(r"--[a-z][\w-]*", section)), words
        assert "--quiet" in table


def test_every_field_of_every_record_is_on_the_page() -> None:
    page = records_format.page()
    for kind, cls in {**schema.KINDS, **schema.OTHERS}.items():
        section = page.split(f"## {kind}\n")[1].partition("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", section, re.M) == [f.name for f in fields(cls)]
    assert "| `timeline` | `tuple[Change, ...]` | `()` | The decisions of a controller" in page


def test_names_of_specs_have_their_parameters() -> None:
    page = spec_names.page()
    assert "| `residual` | `decay=1.0` |" in page
    assert "| `hierarchical` | `node`, `between=auto` |" in page
    assert "`nesterov=false`" in page


def test_versions_are_those_of_the_project() -> None:
    page = versions.page(ROOT)
    assert re.search(r"\| torch \| >=2\.7 \| 2\.\d+\.\d+ \| always \|", page)
    assert "`logging`" in page
    matrix = (ROOT / ".github/workflows/checks.yml").read_text("utf-8")
    table = page.split("## Python and torch")[1]
    assert table.count(".") > 10
    for python in set(re.findall(r'python: "([\d.]+)", torch', matrix)):
        assert f"| {python} |" in table


def test_the_accuracy_of_a_method_is_that_of_its_study() -> None:
    found = method_results.by_method(ROOT / "results")
    by_study = {(r.study, r.spec): r for r in found["powersgd"]}
    result = by_study["cifar10", "powersgd:rank=1"]
    study = (ROOT / "docs" / "results" / "cifar10.md").read_text("utf-8")
    row = next(line for line in study.splitlines() if line.startswith("| `powersgd:rank=1` |"))
    share, deviation = (float(word) / 100 for word in result.quality.rstrip(" %").split(" ± "))
    assert f"| {result.seeds} | 1,164 | {share:.3f} ± {deviation:.3f} |" in row
    assert f"| {result.fewer_bytes[:-1]} ±" in row
    assert f"{result.dense}" in study
    assert method_results.text([]) == "No finished run of a study is on record."
    assert f"[cifar10](../../results/cifar10.md) | {result.setting} |" in method_results.text(
        found["powersgd"]
    )


def test_studies_of_papers_are_defined_and_counted() -> None:
    page = paper_studies.page(ROOT / "results")
    for names in paper_studies.PAPERS.values():
        assert set(names) <= set(STUDIES)
        for name in names:
            [row] = [line for line in page.splitlines() if re.match(rf"\| [\[`]{name}[\]`]", line)]
            runs, steps = row.split(" | ")[2:4]
            assert int(steps.replace(",", "")) == STUDIES[name].steps
            assert int(runs) % len(STUDIES[name].cases) == 0
    assert set(GRACE_TASKS) <= {name for names in paper_studies.PAPERS.values() for name in names}
