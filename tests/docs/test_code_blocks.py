"""The code of pages that show complete programs runs as it is printed."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwire
from gradwire.registry import COMPRESSORS, entry_points_of

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> dict[str, str]:
    """Returns the code blocks of a language by title, or by number if they have none."""
    text = (DOCS / page).read_text()
    found = re.findall(rf'```{language}(?: title="([^"]*)")?\n(.*?)```', text, flags=re.DOTALL)
    return {title or str(number): code for number, (title, code) in enumerate(found)}


@pytest.fixture
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Puts the example where it can be imported, and forgets it afterwards."""
    for title, code in blocks("how-to/plugins.md", "python").items():
        if title.endswith(".py"):
            (tmp_path / title).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(COMPRESSORS._registered)
    entry_points_of.cache_clear()
    yield
    entry_points_of.cache_clear()
    COMPRESSORS._registered.clear()
    COMPRESSORS._registered.update(before)
    sys.modules.pop("rowsign", None)


@pytest.mark.usefixtures("_clean")
def test_the_example_of_a_method_runs_and_conforms() -> None:
    names: dict[str, object] = {}
    found = blocks("how-to/plugins.md", "python")
    programs = [code for title, code in found.items() if not title.endswith(".py")]
    assert len(programs) == 2
    for code in programs:
        exec(code, names)
    assert gradwire.format_spec(names["pipeline"]) == "topk:ratio=0.01 | rowsign"


@pytest.mark.usefixtures("_clean")
def test_the_example_of_a_distribution_is_found(tmp_path: Path) -> None:
    text = blocks("how-to/plugins.md", "toml")["pyproject.toml"]
    [name] = re.findall(r'^name = "(.*)"$', text, flags=re.MULTILINE)
    [(group, point, value)] = re.findall(
        r'^\[project\.entry-points\."(.*)"\]\n(\w+) = "(.*)"$', text, flags=re.MULTILINE
    )
    info = tmp_path / "rowsign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{point} = {value}\n")
    entry_points_of.cache_clear()
    assert gradwire.parse("rowsign:width=8").nbytes((8,)) == 8
    origins = {origin.name: origin.distribution for origin in COMPRESSORS.origins()}
    assert origins["rowsign"] == "gradwire-rowsign"


@pytest.mark.usefixtures("_clean")
def test_the_example_of_a_test_runs_each_property(tmp_path: Path) -> None:
    plugin = "gradwire.testing.pytest_plugin"
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [*command, "--strict-markers", "-rA", "-k", "ranks_agree", "test_rowsign.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_conformance[ranks_agree-rowsign.RowSign:width=32-" in done.stdout
    assert re.search(r"\n2 passed, \d\d+ deselected", done.stdout)


def test_the_example_of_policies_runs(capsys: pytest.CaptureFixture[str]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.embedding, self.norm = nn.Embedding(64, 64), nn.LayerNorm(64)
            self.head = nn.Linear(64, 64)

    model = Net()
    names: dict[str, object] = {"model": model}
    [code] = blocks("how-to/policies.md", "python").values()
    exec(code, names)
    assert capsys.readouterr().out.splitlines() == [
        "*embed* int4 1 2176",
        "*norm* none 2 512",
        "default powersgd:rank=4 2 2304",
    ]
    sim = names["sim"]
    assert isinstance(sim, gradwire.Simulation)
    gradients = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    sim.step([gradients] * 4)
