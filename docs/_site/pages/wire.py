"""The table of message parts in docs/reference/wire.md, made from the classes."""

from pathlib import Path

from gradwire.catalogue import rows
from gradwire.compressors._sparsifier import Pipeline
from gradwire.spec import compressor_classes
from pages.markdown import code, listed, table, write_between

BEGIN, END = "<!-- messages: begin -->", "<!-- messages: end -->"


def messages() -> str:
    """Returns the parts of every method's message; methods with equal messages share a row."""
    classes = compressor_classes()
    names: dict[str, list[str]] = {}
    for row in rows():
        names.setdefault(classes[row.name].message, []).append(code(row.name))
    lines = [(listed(found), message) for message, found in names.items()]
    return table(("method", "parts"), [*lines, ("a pipeline", Pipeline.message)], words=2)


def write_into(page: Path) -> None:
    """Replaces the text between the marks of the page by the table."""
    write_between(page, BEGIN, END, messages())
