"""Generates the page of the record format from the dataclasses of bench/records/schema.py."""

import ast
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import NamedTuple

from gradwire.bench.records import schema
from pages.markdown import code, table


class RecordField(NamedTuple):
    """A field as the source has it: type and default as text, and its own docstring."""

    name: str
    kind: str
    default: str
    meaning: str


def page() -> str:
    """Returns a section for every kind of record, then those of their parts."""
    classes = _classes()
    kinds = {cls.__name__: kind for kind, cls in {**schema.KINDS, **schema.OTHERS}.items()}
    parts = [name for name in classes if name not in kinds]
    return "\n\n".join(
        text for name in [*kinds, *parts] for text in _section(name, kinds.get(name), classes[name])
    )


def fields_of(cls: ast.ClassDef) -> list[RecordField]:
    """Returns the fields of a dataclass in their order."""
    found: list[RecordField] = []
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = ast.unparse(node.annotation)
            found.append(RecordField(node.target.id, kind, _default(node.value), ""))
        elif (text := _text(node)) and found:
            found[-1] = found[-1]._replace(meaning=" ".join(text.split()))
    return found


def _classes() -> dict[str, ast.ClassDef]:
    tree = ast.parse(Path(schema.__file__).read_text("utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _section(name: str, kind: str | None, cls: ast.ClassDef) -> Iterator[str]:
    yield f"## {name}" if kind is None else f"## {kind}"
    yield cleandoc(ast.get_docstring(cls) or "")
    lines = [
        (code(f.name), code(f.kind), code(f.default) if f.default else "", f.meaning)
        for f in fields_of(cls)
    ]
    yield table(("field", "type", "default", ""), lines, words=4)


def _default(value: ast.expr | None) -> str:
    """Returns the default as text; of `field(default=x)` it is x."""
    if isinstance(value, ast.Call):
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        return ast.unparse(given["default"])
    return "" if value is None else ast.unparse(value)


def _text(node: ast.stmt) -> str:
    """Returns the text of a docstring that follows a field."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return ""
