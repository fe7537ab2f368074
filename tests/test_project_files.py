"""The files around the code agree with it: workflows, groups of dependencies, the Makefile."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from audit import project

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
GITHUB = sorted((ROOT / ".github").rglob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(path: Path) -> None:
    assert isinstance(read(path), dict)
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    for line in re.findall(r"run: make (.*)", path.read_text()):
        words = [word for word in line.split() if re.fullmatch(r"[a-z-]+", word)]
        assert words
        assert set(words) <= targets


def test_the_matrix_covers_the_declared_versions() -> None:
    jobs = read(ROOT / ".github/workflows/checks.yml")["jobs"]
    rows = jobs["versions"]["strategy"]["matrix"]["include"]
    declared = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT))
    assert {row["python"] for row in rows} == declared
    assert all(
        any(row["torch"].startswith("2.7.") for row in rows if row["python"] == python)
        for python in declared
    ), "the oldest torch is tried with every Python"
    (torch,) = (r for r in project()[""] if r.name == "torch")
    assert torch.specifier == SpecifierSet(">=2.7")
    assert all(row["torch"] in torch.specifier for row in rows)


def test_the_group_of_the_fast_tests_has_the_ranges_of_the_extras() -> None:
    section = PYPROJECT.split("[dependency-groups]")[1].split("\n[")[0]
    group = set(re.findall(r'"([^"]+)"', section))
    extras = {str(r) for part, rs in project().items() if part != "build" for r in rs}
    assert len(group) > 5
    assert group - {"packaging>=24", "PyYAML>=6"} <= extras


def test_make_demo_installs_neither_tests_nor_documentation() -> None:
    rule = MAKEFILE.split("\n$(DEMO_READY):")[1]
    assert "'.[bench]'" in rule.split("touch")[0]
    assert "--quiet" not in rule.split("touch")[0]
    assert re.search(r"^demo: \$\(DEMO_READY\)", MAKEFILE, re.M)
