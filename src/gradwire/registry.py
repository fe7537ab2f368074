"""The registry: classes of compressors, memories, exchanges and controllers by name.

A class of this package is found by scanning a folder: the name of a method is the name of the file
that holds its class, with hyphens for underscores. Others are registered (`gradwire.register`), or
offered by the entry points of installed distributions, which are imported when they are asked for.
Ranks compare the classes themselves (`gradwire.identity`), since a name may mean different ones.
"""

import pkgutil
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import gradwire.compressors
import gradwire.exchange
import gradwire.memory
from gradwire.base import Compressor, Exchange, Memory
from gradwire.errors import ConfigError
from gradwire.identity import PACKAGE, class_name, is_own

T = TypeVar("T")

REGISTERED = "registered"
"""Origin of a class that was registered in this process."""

RESERVED = ("auto", "default")
"""Names with another meaning where a method's name is expected."""


_registries: "list[Registry[Any]]" = []


class Origin(NamedTuple):
    """A name of the registry, and the distribution that it comes from."""

    name: str
    distribution: str


def shown(name: str) -> str:
    """Returns the public form of a file name, with hyphens."""
    return name.replace("_", "-")


@cache
def own_classes(folder: ModuleType, kind: type[T]) -> Mapping[str, type[T]]:
    """Returns the classes of a folder of this package by file name."""
    found: dict[str, type[T]] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        if module.name.startswith("_"):
            continue
        here = f"{folder.__name__}.{module.name}"
        for member in vars(import_module(here)).values():
            own = isinstance(member, type) and member.__module__ == here
            if own and issubclass(member, kind) and not isabstract(member):
                name = shown(module.name)
                assert name not in found, f"two classes in {here}"
                found[name] = member
    return found


@cache
def entry_points_of(group: str) -> tuple[EntryPoint, ...]:
    """Returns the entry points of a group; the folders of installed packages are read once."""
    return tuple(sorted(entry_points(group=group), key=lambda point: (point.name, point.value)))


class Registry(Generic[T]):
    """The classes of one kind: those of a folder, registered ones, and those of entry points."""

    def __init__(self, noun: str, group: str, folder: ModuleType, kind: type[T]) -> None:
        self.noun, self.group, self.kind = noun, f"{PACKAGE}.{group}", kind
        self._folder = folder
        self._registered: dict[str, type[T]] = {}
        _registries.append(self)

    def own(self) -> Mapping[str, type[T]]:
        """Returns the classes of this package."""
        return own_classes(self._folder, self.kind)  # type: ignore[arg-type]

    def names(self) -> list[str]:
        """Returns all names, those of plug-ins included, without importing any of them."""
        return [origin.name for origin in self.origins()]

    def origins(self) -> list[Origin]:
        """Returns all names in order, each with the distribution that it comes from."""
        found = dict.fromkeys(self.own(), PACKAGE)
        found |= dict.fromkeys(self._registered, REGISTERED)
        for point in entry_points_of(self.group):
            found.setdefault(shown(point.name), _distribution(point))
        return [Origin(name, found[name]) for name in sorted(found)]

    def find(self, name: str) -> type[T] | None:
        """Returns the class of this name, or None if there is none.

        Raises ConfigError if several distributions offer one, or if it cannot be imported.
        """
        name = shown(name)
        points = [p for p in entry_points_of(self.group) if shown(p.name) == name]
        known = self.own().get(name) or self._registered.get(name)
        others = [p for p in points if known is None or p.value != _value_of(known)]
        first = [] if known is None else [_origin_of(known)]
        if len(sources := [*first, *(_offered(p) for p in others)]) > 1:
            raise ConfigError(
                f"{self.noun} {name!r} is offered by {' and by '.join(sources)}; uninstall one, or "
                "give an object instead of its name"
            )
        return self._load(others[0]) if others else known

    def add(self, cls: type[T], name: str) -> None:
        """Registers a class; a class of the same module and name replaces it, as in a notebook."""
        self._check_class(cls, f"register: {name}")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or name in RESERVED:
            raise ConfigError(
                "register: a name must have small letters, digits and hyphens, begin with a letter "
                f"and be none of {', '.join(RESERVED)}, got {name!r}"
            )
        before = self.own().get(name) or self._registered.get(name)
        points = [p for p in entry_points_of(self.group) if shown(p.name) == name]
        taken = [] if before is None or _value_of(before) == _value_of(cls) else [before]
        sources = [*map(_origin_of, taken), *(_offered(p) for p in points)]
        if taken or any(p.value != _value_of(cls) for p in points):
            raise ConfigError(
                f"register: there is a {self.noun} {name!r} already, of {sources[0]}; register "
                f"{class_name(cls)} with another name"
            )
        self._registered[name] = cls

    def name_of(self, cls: type) -> str | None:
        """Returns the name under which a class outside this package can be found, or None."""
        for name, known in self._registered.items():
            if known is cls:
                return name
        for point in entry_points_of(self.group):
            if point.value == _value_of(cls):
                return shown(point.name)
        return None

    def _load(self, point: EntryPoint) -> type[T]:
        try:
            cls = point.load()
        except Exception as error:
            raise ConfigError(
                f"{self.noun} {shown(point.name)!r} cannot be imported from {_offered(point)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._check_class(cls, f"entry point {point.name} of {_distribution(point)}")
        found: type[T] = cls
        return found

    def _check_class(self, cls: object, where: str) -> None:
        if not isinstance(cls, type) or not issubclass(cls, self.kind):
            raise ConfigError(
                f"{where}: expected a subclass of {self.kind.__name__}, got {_described(cls)}"
            )
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        if missing:
            raise ConfigError(f"{where}: {class_name(cls)} does not define {missing}")
        if not is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise ConfigError(
                f"{where}: {class_name(cls)} must be a frozen dataclass, whose fields are its "
                "parameters"
            )


def _value_of(cls: type) -> str:
    """Returns the entry point's value that would name this class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _distribution(point: EntryPoint) -> str:
    return "an unknown distribution" if point.dist is None else point.dist.name


def _offered(point: EntryPoint) -> str:
    return f"{_distribution(point)} ({point.value})"


def _origin_of(cls: type) -> str:
    return PACKAGE if is_own(cls) else class_name(cls)


def _described(cls: object) -> str:
    return class_name(cls) if isinstance(cls, type) else repr(cls)


# mypy does not accept an abstract class as the kind to look for.
COMPRESSORS = Registry("compressor", "compressors", gradwire.compressors, Compressor)  # type: ignore[type-abstract]
MEMORIES = Registry("memory", "memories", gradwire.memory, Memory)  # type: ignore[type-abstract]
EXCHANGES = Registry("exchange", "exchanges", gradwire.exchange, Exchange)  # type: ignore[type-abstract]


def plugin_name(cls: type) -> str | None:
    """Returns the name under which a class outside this package can be found, or None."""
    for registry in _registries:
        if issubclass(cls, registry.kind):
            return registry.name_of(cls)
    return None
