"""The documents agree with the code: table of methods, example, names, files, version."""

import re
from pathlib import Path

import torch

import gradwire
from gradwire.catalogue import BEGIN, END, markdown, rows
from pages import readme_results

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
USAGE = (ROOT / "docs" / "reference" / "usage.md").read_text()
TABLE = (ROOT / "docs" / "reference" / "methods" / "table.md").read_text()


def test_the_table_of_methods_is_generated() -> None:
    table = TABLE.split(BEGIN)[1].split(END)[0].strip()
    assert table == markdown(rows()), "run: make table"


def test_the_snippet_runs() -> None:
    """Runs the part of the example in docs/reference/usage.md that needs no process group."""
    x = torch.randn(64, 32)
    codec = gradwire.parse("topk:ratio=0.01 | qsgd:bits=4")
    payload = codec.encode(x)
    assert payload.nbytes < x.nbytes / 50
    assert codec.decode(payload).shape == x.shape
    model = torch.nn.Linear(64, 64)
    sim = gradwire.simulate(model, "efsign", workers=64)
    gradients = [{n: torch.randn_like(p) for n, p in model.named_parameters()} for _ in range(64)]
    assert sim.step(gradients).keys() == {"weight", "bias"}


def test_every_name_of_the_package_in_the_documents_exists() -> None:
    for name in re.findall(r"gradwire\.([A-Za-z_]+)\(", README + USAGE):
        assert getattr(gradwire, name) is not None


def test_every_file_named_in_the_documents_exists() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        text = document.read_text()
        for target in re.findall(r"\]\((?!https:)([^)#]+)\)", text):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
        # train.py is the reader's own script, as are those that the page shows.
        own = {"train.py", *re.findall(r'^```python title="(.+)"$', text, flags=re.MULTILINE)}
        named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text)) - own
        for name in named:
            places = [ROOT / name, ROOT / "src/gradwire" / name]
            assert any(place.exists() for place in places), f"{document.name}: {name}"


def test_versions_agree() -> None:
    assert f"version: {gradwire.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_the_table_of_results_is_that_of_the_records() -> None:
    table = README.split(readme_results.BEGIN)[1].split(readme_results.END)[0].strip()
    assert table == readme_results.results_table(ROOT / "results"), "run: make table"
    assert "interrupted" not in table
    demo = README.split(readme_results.DEMO_BEGIN)[1].split(readme_results.DEMO_END)[0].strip()
    assert demo == readme_results.demo_text(ROOT / "results"), "run: make table"


def test_the_first_page_is_short() -> None:
    assert README.count("\n") <= 130


def test_every_figure_that_links_to_a_result_is_on_its_page() -> None:
    """The pages themselves are compared with the records in tests/docs."""
    before, after = README.split(readme_results.BEGIN)
    outside = before + after.split(readme_results.END)[1]
    links = re.findall(r"\[([^\]]*\d[^\]]*)\]\((docs/results/[\w-]+\.md)\)", outside)
    assert links
    for figure, page in links:
        assert figure in (ROOT / page).read_text("utf-8"), f"{figure} is not in {page}"
