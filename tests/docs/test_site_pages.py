"""The page of public names, pages copied from elsewhere, and Markdown."""

from pathlib import Path

import gradwire
from pages import api, copied
from pages.markdown import table

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_on_the_page() -> None:
    page = api.page()
    for name in [*gradwire.__all__, *gradwire.local.__all__, *gradwire.optim.__all__]:
        if name not in ("local", "optim"):
            assert f"### {name}\n" in page
    assert "gradwire.parse(spec: str) -> Compressor" in page
    method = "Compressor | str | Policies | Mapping[str, object] | Settings"
    assert f"compressor: {method},\n    *,\n    process_group:" in page
    assert "**`switch(compressor, memory=None, exchange='auto')`**" in page


def test_links_of_copied_pages_are_adapted() -> None:
    texts = copied.pages(ROOT)
    assert set(texts) == {"changelog.md", "contributing.md", "security.md"}
    assert "](reliability.md)" in texts["security.md"]
    assert not any("](docs/" in text for text in texts.values())


def test_links_that_leave_the_docs() -> None:
    text = "[a](../SECURITY.md) [b](../../SECURITY.md#x) [c](../wire.md)"
    assert copied.from_docs(text, 0).startswith("[a](security.md) [b](../../SECURITY")
    assert "[b](../security.md#x) [c](../wire.md)" in copied.from_docs(text, 1)


def test_a_cell_cannot_break_its_table() -> None:
    lines = table(("a", "b"), [("x|y", "two\nlines")]).splitlines()
    assert lines == ["| a | b |", "| --- | --: |", "| x\\|y | two lines |"]
