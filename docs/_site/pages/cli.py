"""Generates the page of the command line from the help of typer's commands."""

import re
from collections.abc import Iterator
from inspect import cleandoc
from typing import Any

import typer

from gradwire.cli import app
from pages.markdown import code, fence, table

NAME = "gradwire"


def page() -> str:
    """Returns a section for every command, in the order of `gradwire --help`."""
    found = commands(NAME, typer.main.get_command(app))
    return "\n\n".join(part for words, command in found for part in _section(words, command))


def commands(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yields every command without subcommands, with the words that call it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name, child in inner.items():
        yield from commands(f"{words} {name}", child)


def _section(words: str, command: Any) -> Iterator[str]:
    context = command.make_context(words, [], resilient_parsing=True)
    yield f"## {words}"
    yield _marked(cleandoc(command.help))
    yield fence(" ".join([words, *command.collect_usage_pieces(context)]), "text")
    records = [p.get_help_record(context) for p in command.params]
    lines = [(code(names), _as_text(text)) for names, text in filter(None, records)]
    yield table(("option", "meaning"), lines, words=2)


def _as_text(text: str) -> str:
    """Marks the default of an option, which typer writes in brackets."""
    meaning, bracket, rest = text.partition("[default:")
    meaning = _marked(meaning.strip())
    return f"{meaning} Default: {code(rest.strip().rstrip(']'))}." if bracket else meaning


def _marked(text: str) -> str:
    """Returns the text of a terminal as Markdown: options as code, pages as links."""
    words = text.replace("*", r"\*").split("`")
    for i in range(0, len(words), 2):
        words[i] = re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"`\1`", words[i])
        words[i] = re.sub(r"docs/([\w-]+)/([\w-]+)\.md", r"[\2](../\1/\2.md)", words[i])
    return "`".join(words)
