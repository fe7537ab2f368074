"""Markdown from values: tables whose cells are escaped."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from gradwire.errors import ConfigError

GENERATED = "<!-- Written by `make table` from results/; do not edit. -->"
"""The first line of a page that is made from records."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Returns a table; its first `words` columns are aligned as text, the others as numbers."""
    rule = ["---"] * words + ["--:"] * (len(columns) - words)
    return "\n".join(_line(cells) for cells in [columns, rule, *rows])


def _line(cells: Sequence[str]) -> str:
    safe = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(safe)} |"


def code(text: str) -> str:
    return f"`{text}`"


def fence(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"


def fold(summary: str, text: str) -> str:
    """Returns markdown that is hidden until the reader opens it."""
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"


def listed(items: Iterable[str]) -> str:
    """Joins items in one sentence."""
    return ", ".join(items) or "none"


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replaces the text between two marks of a page."""
    old = page.read_text(encoding="utf-8")
    if begin not in old or end not in old:
        raise ConfigError(f"{page}: expected the marks {begin} and {end}")
    head, tail = old.split(begin)[0], old.split(end)[1]
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")
