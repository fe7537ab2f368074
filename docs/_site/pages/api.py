"""Generates the page of public names from their signatures and docstrings."""

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import gradwire
from pages.markdown import code, fence

COLUMNS = 88


def page() -> str:
    """Returns the page: all names of `gradwire`, then those of its two public modules."""
    modules = (gradwire, gradwire.local, gradwire.optim)
    return "\n\n".join(text for m in modules for text in (f"## {m.__name__}", *_names(m)))


def _names(module: ModuleType) -> Iterator[str]:
    for name in sorted(module.__all__, key=str.lower):
        item = getattr(module, name)
        if isinstance(item, ModuleType):
            continue
        full = f"{module.__name__}.{name}"
        yield f"### {name}"
        yield from _class(full, item) if isinstance(item, type) else _function(full, item)


def _class(full: str, cls: type) -> Iterator[str]:
    if not issubclass(cls, Exception):
        yield from _signature(full, cls)
    yield inspect.getdoc(cls) or ""
    for name, member in sorted(inspect.getmembers(cls)):
        if name.startswith("_") or not _documented(cls, name):
            continue
        if inspect.isfunction(member) or inspect.ismethod(member):
            yield f"**{code(f'{name}{_arguments(member)}')}**"
            yield inspect.getdoc(member) or ""
        elif isinstance(member, property):
            yield f"**{code(name)}**"
            yield inspect.getdoc(member) or ""


def _documented(cls: type, name: str) -> bool:
    """Returns whether a member is defined in gradwire and has a docstring."""
    for owner in cls.__mro__:
        if name in vars(owner):
            return owner.__module__.startswith("gradwire") and bool(
                inspect.getdoc(vars(owner)[name])
            )
    return False


def _function(full: str, item: Any) -> Iterator[str]:
    yield from _signature(full, item)
    yield inspect.getdoc(item) or ""


def _signature(full: str, item: Any) -> Iterator[str]:
    try:
        signature = inspect.signature(item)
    except (TypeError, ValueError):
        return
    if isinstance(item, type):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    line = full + _short(str(signature))
    if len(line) > COLUMNS:
        inside = "".join(f"    {_short(p)},\n" for p in _spread(signature))
        ends = _short(str(signature)).rpartition(")")[2]
        line = f"{full}(\n{inside}){ends}"
    yield fence(line)


def _short(annotated: str) -> str:
    """Removes module names from types, and the markers of type variables and of typed options."""
    annotated = annotated.replace("'Unpack[Options]'", "Options").replace("~", "")
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", annotated)


def _spread(signature: inspect.Signature) -> Iterator[str]:
    """Yields the parameters, with a star before keyword-only ones."""
    starred = False
    for parameter in signature.parameters.values():
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield str(parameter)


def _arguments(member: Any) -> str:
    """Returns the names of a method's parameters, with defaults, in parentheses."""
    own = [p for p in inspect.signature(member).parameters.values() if p.name != "self"]
    words = [str(p.replace(annotation=inspect.Parameter.empty)) for p in own]
    return f"({', '.join(words)})"
