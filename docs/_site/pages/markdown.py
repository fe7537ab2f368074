"""Markdown from values: tables whose cells cannot break them."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table; its first `words` columns are aligned as text, the others as numbers."""
    rule = ["---"] * words + ["--:"] * (len(columns) - words)
    return "\n".join(_line(cells) for cells in [columns, rule, *rows])


def _line(cells: Sequence[str]) -> str:
    safe = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(safe)} |"


def code(text: str) -> str:
    return f"`{text}`"


def fence(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"


def listed(items: Iterable[str]) -> str:
    """Items in one sentence."""
    return ", ".join(items) or "none"
