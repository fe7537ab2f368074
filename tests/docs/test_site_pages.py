"""The page of public names, pages copied from elsewhere, contents of the site, and Markdown."""

import re
from pathlib import Path

import pytest

import assemble
import gradwire
from pages import api, copied
from pages.markdown import table

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_on_the_page() -> None:
    page = api.page()
    modules = (gradwire.local, gradwire.decentralized, gradwire.optim, gradwire.elastic)
    for name in [*gradwire.__all__, *(name for module in modules for name in module.__all__)]:
        if name not in ("decentralized", "elastic", "local", "optim"):
            assert f"### {name}\n" in page
    assert ":::{py:function} gradwire.parse(spec: str) -> Compressor\n" in page
    method = "Compressor | str | Policies | Mapping[str, object] | Settings"
    assert f"compressor: {method}, *, process_group:" in page
    assert ":::{py:method} switch(compressor, memory=None, exchange='auto')\n" in page


def test_links_of_copied_pages_are_adapted() -> None:
    texts = copied.pages(ROOT)
    assert set(texts) == {"changelog.md", "contributing.md", "security.md"}
    assert "](explanation/reliability.md)" in texts["security.md"]
    assert not any("](docs/" in text for text in texts.values())


def test_links_that_leave_the_docs() -> None:
    text = "[a](../SECURITY.md) [b](../../SECURITY.md#x) [c](../wire.md)"
    assert copied.from_docs(text, 0).startswith("[a](security.md) [b](../../SECURITY")
    assert "[b](../security.md#x) [c](../wire.md)" in copied.from_docs(text, 1)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "docs"
    assemble.assemble(ROOT / "docs", folder)
    return folder


def test_the_contents_have_every_page_once(site: Path) -> None:
    listed = []
    for page in site.rglob("*.md"):
        for tree in re.findall(r"```{toctree}\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed += [(page.parent / name).relative_to(site).as_posix() for name in names]
    pages = {p.relative_to(site).with_suffix("").as_posix() for p in site.rglob("*.md")}
    assert sorted(listed) == sorted(pages - {"index"})


def test_public_names_link_to_their_description(site: Path) -> None:
    other = "[`gradwire.parse`](x)\n# `gradwire.parse`\n```\n`gradwire.parse`\n```"
    text = f"`gradwire.attach(model)` {other}"
    linked = assemble.link_names(text, "how-to/faq.md")
    assert linked == text.replace(
        "`gradwire.attach(model)`", "[`gradwire.attach(model)`](../reference/api.md#attach)"
    )


def test_headings_inside_folds_are_bold_lines() -> None:
    text = "# a\n<details>\n<summary>b</summary>\n\n#### c\n\n</details>\n## d"
    assert assemble.without_headings_in_folds(text) == text.replace("#### c", "**c**")


def test_file_names_are_captions() -> None:
    text = '```python title="train.py"\nx\n```\n```sh title="run"\ny\n```'
    shown = assemble.with_captions(text)
    assert shown.startswith("```{code-block} python\n:caption: train.py\n\nx\n```")
    assert shown.endswith('```sh title="run"\ny\n```')


def test_a_cell_cannot_break_its_table() -> None:
    lines = table(("a", "b"), [("x|y", "two\nlines")]).splitlines()
    assert lines == ["| a | b |", "| --- | --: |", "| x\\|y | two lines |"]
