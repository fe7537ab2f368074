"""Generates tables of the names that specs of memories, exchanges and controllers may have."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from inspect import getdoc

from gradwire.base import TwoLevelExchange
from gradwire.control.base import CONTROLLERS
from gradwire.spec import exchange_classes, memory_classes
from pages.markdown import code, listed, table

KINDS: Mapping[str, Mapping[str, type]] = {
    "Memories": memory_classes(),
    "Exchanges": exchange_classes(),
    "Controllers": CONTROLLERS.own(),
}


def page() -> str:
    """Returns a table for each kind: names, parameters with their defaults, and a summary."""
    parts = []
    for title, classes in KINDS.items():
        lines = [(code(name), _parameters(cls), _summary(cls)) for name, cls in classes.items()]
        parts += [f"### {title}", table(("name", "parameters", ""), lines, words=3)]
    return "\n\n".join(parts)


def _parameters(cls: type) -> str:
    own = [f for f in fields(cls) if f.name != "codec"]
    texts = [f"{f.name}{_default(f.default)}" for f in own]
    if issubclass(cls, TwoLevelExchange):
        texts = ["node", "between=auto"]
    return listed(code(text) for text in texts)


def _default(value: object) -> str:
    """Returns a default as specs have it."""
    if value is MISSING:
        return ""
    return f"={str(value).lower() if isinstance(value, bool) else value}"


def _summary(cls: type) -> str:
    return (getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
