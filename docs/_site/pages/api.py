"""Generates the page of public names from their signatures and docstrings.

Every name is an object of Sphinx's Python domain, so that other projects can link to it.
"""

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import gradwire


def page() -> str:
    """Returns the page: all names of `gradwire`, then those of its public modules."""
    parts = gradwire.local, gradwire.decentralized, gradwire.optim, gradwire.elastic
    described: dict[int, str] = {}
    return "\n\n".join(
        text for m in (gradwire, *parts) for text in (f"## {m.__name__}", *_names(m, described))
    )


def _names(module: ModuleType, described: dict[int, str]) -> Iterator[str]:
    """Yields a description of each name; of what another module describes already, its name."""
    for name in sorted(module.__all__, key=str.lower):
        item = getattr(module, name)
        if isinstance(item, ModuleType):
            continue
        full = f"{module.__name__}.{name}"
        yield f"### {name}"
        if (first := described.setdefault(id(item), full)) != full:
            yield f"It is `{first}`, described above."
            continue
        yield from _class(full, item) if isinstance(item, type) else _function(full, item)


def _class(full: str, cls: type) -> Iterator[str]:
    if issubclass(cls, Exception):
        yield _object("py:exception", full, inspect.getdoc(cls) or "")
        return
    parts = [inspect.getdoc(cls) or ""]
    for name, member in sorted(inspect.getmembers(cls)):
        if name.startswith("_") or not _documented(cls, name):
            continue
        text = inspect.getdoc(member) or ""
        if inspect.isfunction(member) or inspect.ismethod(member):
            parts.append(_object("py:method", f"{name}{_arguments(member)}", text))
        elif isinstance(member, property):
            parts.append(_object("py:property", name, text))
    yield _object("py:class", _signature(full, cls), "\n\n".join(parts), fence="::::")


def _documented(cls: type, name: str) -> bool:
    """Returns whether a member is defined in gradwire and has a docstring."""
    for owner in cls.__mro__:
        if name in vars(owner):
            return owner.__module__.startswith("gradwire") and bool(
                inspect.getdoc(vars(owner)[name])
            )
    return False


def _function(full: str, item: Any) -> Iterator[str]:
    yield _object("py:function", _signature(full, item), inspect.getdoc(item) or "")


def _object(directive: str, signature: str, text: str, fence: str = ":::") -> str:
    return f"{fence}{{{directive}}} {signature}\n\n{text}\n{fence}"


def _signature(full: str, item: Any) -> str:
    try:
        signature = inspect.signature(item)
    except (TypeError, ValueError):
        return full
    if isinstance(item, type):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    return full + _short(str(signature))


def _short(annotated: str) -> str:
    """Removes module names from types, and the markers of type variables and of typed options."""
    annotated = annotated.replace("'Unpack[Options]'", "Options").replace("~", "")
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", annotated)


def _arguments(member: Any) -> str:
    """Returns the names of a method's parameters, with defaults, in parentheses."""
    own = [p for p in inspect.signature(member).parameters.values() if p.name != "self"]
    words = [str(p.replace(annotation=inspect.Parameter.empty)) for p in own]
    return f"({', '.join(words)})"
