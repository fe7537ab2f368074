"""The identity of a method: its class and all its fields, defaults included, as JSON values.

Ranks compare identities when they attach, and a saved state is loaded only by a method of the same
identity. A class of this package is identified by its name, any other by its module and qualified
name. `code_digests` also covers what other classes do, so that ranks notice if they run different
versions of a user's file; states leave that out, since a comment or a repair would make them
useless.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from hashlib import sha256
from inspect import unwrap
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.consistency import differences
from gradwire.errors import ConfigError

PACKAGE = __name__.partition(".")[0]


def is_own(cls: type) -> bool:
    """Returns whether a class is one of this package."""
    return cls.__module__.partition(".")[0] == PACKAGE


def class_name(cls: type) -> str:
    """Returns the name of a class of this package; with its module if it is any other."""
    return cls.__qualname__ if is_own(cls) else f"{cls.__module__}.{cls.__qualname__}"


def identity_of(item: object) -> dict[str, object]:
    """Returns the class and all fields of a dataclass, as values that JSON can hold.

    Fields with `compare=False` are left out: they are no parameters. Raises ConfigError for a field
    that processes cannot compare, such as a lambda.
    """
    name = class_name(type(item))
    if isinstance(item, type) or not is_dataclass(item):
        raise ConfigError(f"{name}: must be a dataclass, whose fields are its parameters")
    values = _fields(item).items()
    return {"class": name, **{key: _as_json(f"{name}: {key}", value) for key, value in values}}


def check_saved_identity(role: str, saved: object, expected: Mapping[str, object]) -> None:
    """Raises ConfigError with the first entry in which an identity from a state differs.

    `saved` may be JSON text; `role` precedes the names of entries, unless it is empty.
    """
    try:
        found = json.loads(saved) if isinstance(saved, str) else saved
        # Compared as JSON, which has no tuples.
        first = next(differences([found, json.loads(json.dumps(expected))], role), None)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"state: {role or 'plan'} cannot be read: {error}") from None
    if first is not None:
        path, (value, wanted) = first
        raise ConfigError(f"state: {path or 'plan'} is {value}, expected {wanted}")


def code_digests(item: object) -> dict[str, str]:
    """Returns a digest of the code of each class and function outside the package, by name.

    Covers the compiled methods and simple attributes of an item's classes, and the functions of the
    same module that they call. Other Python versions compile to other code, so the version is
    shown, too.
    """
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    found: dict[str, str] = {}
    for member in _outside(item):
        hashed = _Hashed()
        if isinstance(member, type):
            hashed.add_class(member)
            name = class_name(member)
        else:
            hashed.add_function(member)
            name = _function_name(member)
        found[name] = f"{hashed.digest.hexdigest()[:12]}, {version}"
    return found


def _fields(item: object) -> dict[str, object]:
    assert is_dataclass(item)
    return {f.name: getattr(item, f.name) for f in fields(item) if f.compare}


def _as_json(where: str, value: object) -> object:  # noqa: PLR0911 - one return per kind
    """Returns a value that is equal only for equal parameters."""
    match value:
        case Enum():
            return f"{class_name(type(value))}.{value.name}"
        case None | int() | float() | str():
            return value
        case torch.dtype() | torch.device() | PurePath():
            return str(value)
        case Tensor() | np.ndarray() | np.generic():
            return _of_array(where, value)
        case list() | tuple():
            return [_as_json(where, one) for one in value]
        case set() | frozenset():
            return sorted((_as_json(where, one) for one in value), key=json.dumps)
        case Mapping():
            return _of_mapping(where, value)
        case partial():
            parts = {"function": value.func, "args": value.args, "keywords": value.keywords}
            return _of_mapping(where, parts)
        case FunctionType() | BuiltinFunctionType():
            return _of_function(where, value)
        case type():
            return class_name(value)
        case _ if is_dataclass(value):
            return identity_of(value)
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which ranks and states cannot compare; use numbers, "
        "strings, tensors, functions of a module, or tuples, dicts and dataclasses of them; "
        "field(compare=False) marks what is no parameter"
    )


def _of_array(
    where: str, value: "Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]] | np.generic"
) -> str:
    """Returns the type and value of a scalar, or type, shape and a digest of the contents."""
    if isinstance(value, np.generic):
        return f"{value.dtype} {value}"
    if isinstance(value, Tensor):
        if value.is_meta:
            raise ConfigError(f"{where} is a tensor without contents, which cannot be compared")
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        if value.dtype.hasobject:
            raise ConfigError(f"{where} is an array of objects, which cannot be compared")
        raw = value.tobytes()
    return f"{value.dtype} {tuple(value.shape)}, sha256 {sha256(raw).hexdigest()[:16]}"


def _of_mapping(where: str, value: Mapping[Any, object]) -> object:
    pairs = [(_as_json(where, key), _as_json(where, one)) for key, one in value.items()]
    if all(isinstance(key, str) for key, _ in pairs):
        return {str(key): one for key, one in pairs}
    return sorted(([key, one] for key, one in pairs), key=json.dumps)


def _of_function(where: str, value: FunctionType | BuiltinFunctionType) -> str:
    name = _function_name(value)
    if "<" in name:
        raise ConfigError(
            f"{where} is {name}, of which there may be several; define it with a name, at the top "
            "level of a module"
        )
    return name


def _function_name(value: FunctionType | BuiltinFunctionType) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _is_outside(module: str | None) -> bool:
    top = str(module).partition(".")[0]
    return top != PACKAGE and top not in sys.stdlib_module_names


def _outside(value: object) -> Iterator[type | FunctionType]:
    """Yields the classes and functions outside the package of which a parameter consists."""
    if isinstance(value, FunctionType) and _is_outside(value.__module__):
        yield value
    elif isinstance(value, type):
        yield from (cls for cls in value.__mro__ if _is_outside(cls.__module__))
    elif isinstance(value, partial):
        yield from _outside([value.func, *value.args, *value.keywords.values()])
    elif isinstance(value, Mapping):
        yield from _outside(list(value.values()))
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from _outside(one)
    elif is_dataclass(value):
        yield from _outside(type(value))
        yield from _outside(_fields(value))


class _Hashed:
    """A digest of compiled code, without file names and line numbers."""

    def __init__(self) -> None:
        self.digest = sha256()
        self._seen: set[CodeType] = set()

    def add_class(self, cls: type) -> None:
        for name, member in sorted(vars(cls).items()):
            functions = list(_functions_of(member))
            if functions or not name.startswith("__"):
                self._add_text(name)
            for function in functions:
                self.add_function(function)
            if not functions and not name.startswith("__"):
                self._add_constant(member)

    def add_function(self, function: FunctionType) -> None:
        code = function.__code__
        if code in self._seen:
            return
        self._seen.add(code)
        self._add_code(code)
        self._add_constant(function.__defaults__)
        for key, value in sorted((function.__kwdefaults__ or {}).items()):
            self._add_text(key)
            self._add_constant(value)
        for cell in function.__closure__ or ():
            try:
                self._add_cell(cell.cell_contents)
            except ValueError:
                self._add_text("empty cell")
        for name in sorted(_names(code)):
            helper = function.__globals__.get(name)
            if isinstance(helper, FunctionType) and helper.__module__ == function.__module__:
                self.add_function(helper)

    def _add_cell(self, value: object) -> None:
        if isinstance(value, FunctionType):
            self.add_function(value)
        else:
            self._add_constant(value)

    def _add_code(self, code: CodeType) -> None:
        self.digest.update(code.co_code)
        for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
            self._add_text(",".join(names))
        for constant in code.co_consts:
            self._add_constant(constant)

    def _add_constant(self, value: object) -> None:
        if isinstance(value, CodeType):
            self._add_code(value)
        elif isinstance(value, tuple):
            self._add_text(f"tuple of {len(value)}")
            for one in value:
                self._add_constant(one)
        elif isinstance(value, set | frozenset):
            # The order of a set differs between processes.
            self._add_text(str(sorted(map(repr, value))))
        elif isinstance(value, int | float | complex | str | bytes | None):
            self._add_text(repr(value))
        else:
            # Representations of other objects have addresses.
            self._add_text(type(value).__name__)

    def _add_text(self, text: str) -> None:
        self.digest.update(text.encode() + b"\0")


def _functions_of(member: object) -> Iterator[FunctionType]:
    """Yields the functions of a class member, without decorators."""
    if isinstance(member, property):
        found: list[object] = [member.fget, member.fset, member.fdel]
    elif isinstance(member, cached_property):
        found = [member.func]
    elif isinstance(member, staticmethod | classmethod):
        found = [member.__func__]
    else:
        found = [member]
    for one in found:
        function = unwrap(one) if callable(one) else one
        if isinstance(function, FunctionType):
            yield function


def _names(code: CodeType) -> set[str]:
    """Returns the names that code and its inner functions use."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))
