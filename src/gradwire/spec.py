"""Spec strings to objects and back: "topk:ratio=0.01 | qsgd:bits=4".

The registry is the folder: a method's name is the name of the file that holds its class, with
hyphens for underscores. Specs may have either.
"""

import pkgutil
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from inspect import isabstract
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import gradwire.compressors
import gradwire.exchange
import gradwire.memory
from gradwire.base import (
    Aggregator,
    Compressor,
    Exchange,
    Memory,
    MultiRound,
    OneRound,
    TwoLevelExchange,
)
from gradwire.compressors._sparsifier import Pipeline, Sparsifier
from gradwire.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Layers:
    """The settings of an exchange in two layers."""

    exchange: str
    node: int
    """Ranks a node."""
    between: str = "auto"
    """The spec of the exchange between nodes; "auto" leaves it open."""

    def __post_init__(self) -> None:
        if self.node < 1:
            raise ConfigError(f"{self.exchange}: node must be at least 1, got {self.node}")
        if self.between != "auto" and issubclass(find_exchange(self.between), TwoLevelExchange):
            raise ConfigError(f"{self.exchange}: between must have one layer, got {self.between!r}")

    def __str__(self) -> str:
        return f"{self.exchange}:node={self.node},between={self.between}"


@cache
def _catalogue(folder: ModuleType, kind: type[T]) -> Mapping[str, type[T]]:
    """The classes of a folder by file name."""
    found: dict[str, type[T]] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        if module.name.startswith("_"):
            continue
        members = vars(import_module(f"{folder.__name__}.{module.name}")).values()
        here = f"{folder.__name__}.{module.name}"
        for member in members:
            own = isinstance(member, type) and member.__module__ == here
            if own and issubclass(member, kind) and not isabstract(member):
                name = _shown(module.name)
                assert name not in found, f"two classes in {here}"
                found[name] = member
    return found


def compressor_classes() -> Mapping[str, type[Compressor]]:
    return _catalogue(gradwire.compressors, Compressor)


def memory_classes() -> Mapping[str, type[Memory]]:
    return _catalogue(gradwire.memory, Memory)


def exchange_classes() -> Mapping[str, type[Exchange]]:
    return _catalogue(gradwire.exchange, Exchange)


def methods() -> list[str]:
    """The names of the catalogue."""
    return sorted(compressor_classes())


def parse(spec: str) -> Compressor:
    """The compressor that a spec string describes."""
    _check_text("compressor", spec)
    stages = [_build("compressor", compressor_classes(), stage) for stage in spec.split("|")]
    if len(stages) == 1:
        return stages[0]
    if len(stages) > 2:
        raise ConfigError(f"a pipeline has two stages, got {len(stages)} in {spec!r}")
    first, second = stages
    if not isinstance(first, Sparsifier):
        raise ConfigError(
            f"{spec!r}: a pipeline starts with a sparsifier, {name_of(first)} is none"
        )
    if not isinstance(second, OneRound) or isinstance(second, Sparsifier):
        raise ConfigError(f"{spec!r}: a pipeline ends with a quantiser, {name_of(second)} is none")
    return Pipeline(first, second)


def compressor_of(given: Compressor | str) -> Compressor:
    """The compressor that a spec string describes; or the given one itself."""
    if isinstance(given, str):
        return parse(given)
    if not isinstance(given, Compressor):
        raise ConfigError(f"expected a spec string or a compressor, got {_named(given)}")
    return given


def memory_of(given: Memory | str) -> Memory:
    """The same of memories."""
    if isinstance(given, str):
        return parse_memory(given)
    if not isinstance(given, Memory):
        raise ConfigError(f"expected a memory or its spec, got {_named(given)}")
    return given


def parse_memory(spec: str) -> Memory:
    return _build("memory", memory_classes(), spec)


def find_exchange(spec: str) -> type[Exchange]:
    """The class of an exchange's spec, whose settings are another matter."""
    _check_text("exchange", spec)
    return _find("exchange", exchange_classes(), spec.partition(":")[0].strip())


def find_layers(spec: str) -> Layers | None:
    """The settings of an exchange's spec if it is one in two layers."""
    if not issubclass(find_exchange(spec), TwoLevelExchange):
        return None
    name, texts = read_settings(spec)
    return from_settings(name, Layers, texts, exchange=name)


def wrap_in_exchange(spec: str, compressor: Compressor) -> Aggregator:
    """A compressor in the exchange that a spec string describes, if it does not talk by itself."""
    name, texts = read_settings(spec)
    cls = find_exchange(name)
    if layers := find_layers(spec):
        assert issubclass(cls, TwoLevelExchange)
        return cls(wrap_in_exchange(layers.between, compressor), layers.node)
    if isinstance(compressor, MultiRound):
        return compressor
    return from_settings(name, cls, texts, codec=compressor)


def build_from(folder: ModuleType, kind: type[T], noun: str, spec: str) -> T:
    """What a spec string describes, by a class of another folder."""
    found: Mapping[str, type[T]] = _catalogue(folder, kind)  # type: ignore[arg-type]
    return _build(noun, found, spec)


def name_of(item: object) -> str:
    """The file name of the item's class."""
    if isinstance(item, Pipeline):
        return f"{name_of(item.sparsifier)}|{name_of(item.quantiser)}"
    return _shown(type(item).__module__.rpartition(".")[2])


def format_spec(item: object) -> str:
    """The spec string of an item, without parameters that have their default; `parse` reads it."""
    if isinstance(item, Pipeline):
        return f"{format_spec(item.sparsifier)} | {format_spec(item.quantiser)}"
    if isinstance(item, type) or not is_dataclass(item):
        raise ConfigError(f"format_spec: expected a compressor or a memory, got {_named(item)}")
    settings = []
    for f in fields(item):
        value = getattr(item, f.name)
        if f.default is MISSING or value != f.default:
            settings.append(f"{f.name}={str(value).lower() if isinstance(value, bool) else value}")
    return name_of(item) + (":" + ",".join(settings) if settings else "")


def _check_text(noun: str, spec: object) -> None:
    """Raises ConfigError unless a spec is text at all."""
    if not isinstance(spec, str):
        raise ConfigError(f"{noun}: a spec must be a string, got {_named(spec)}")


def _named(given: object) -> str:
    """What was given in place of something else, and how to make that if it is its class."""
    known: list[type[Compressor | Memory]] = [
        *compressor_classes().values(),
        *memory_classes().values(),
    ]
    for cls in known:
        if cls is given:
            settings = ", ".join(f"{key}={value!r}" for key, value in cls.examples[0].items())
            return f"the class {cls.__name__}; make one, like {cls.__name__}({settings})"
    return repr(given)


def _build(noun: str, catalogue: Mapping[str, type[T]], spec: str) -> T:
    _check_text(noun, spec)
    name = spec.partition(":")[0].strip()
    cls = _find(noun, catalogue, name)
    return from_settings(_shown(name), cls, read_settings(spec)[1])


def read_settings(spec: str) -> tuple[str, dict[str, str]]:
    """The name and the settings of "name:key=value,key=value", as text."""
    name, colon, rest = spec.strip().partition(":")
    if colon and not rest.strip():
        raise ConfigError(f"{name}: nothing after the colon in {spec!r}")
    texts: dict[str, str] = {}
    for setting in filter(None, (s.strip() for s in rest.split(","))):
        key, equals, value = setting.partition("=")
        if not equals or not value.strip():
            raise ConfigError(f"{name}: expected key=value, got {setting!r} in {spec!r}")
        if key.strip() in texts:
            raise ConfigError(f"{name}: {key.strip()} is set twice in {spec!r}")
        texts[key.strip()] = value.strip()
    return name.strip(), texts


def _shown(name: str) -> str:
    """A name as people read it: a file's may have no hyphen."""
    return name.replace("_", "-")


def _find(noun: str, catalogue: Mapping[str, type[T]], name: str) -> type[T]:
    if _shown(name) in catalogue:
        return catalogue[_shown(name)]
    close = get_close_matches(name, catalogue, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(catalogue)}"
    raise ConfigError(f"no {noun} named {name!r}{hint}")


def from_settings(name: str, cls: type[T], texts: Mapping[str, str], **given: object) -> T:
    """An instance from settings given as text, each read as the type of its field."""
    known = {f.name: f for f in fields(cls) if f.name not in given}  # type: ignore[arg-type]
    unknown = sorted(texts.keys() - known.keys())
    if unknown:
        raise ConfigError(f"{name}: unknown parameter {unknown}, expected {sorted(known)}")
    missing = [k for k, f in known.items() if f.default is MISSING and k not in texts]
    if missing:
        raise ConfigError(f"{name}: missing parameter {missing}")
    types = _types_of(cls)  # type: ignore[arg-type]
    return cls(**given, **{key: _read(name, key, types[key], t) for key, t in texts.items()})


@cache
def _types_of(cls: type) -> Mapping[str, Any]:
    """What the annotations of a class mean, which takes longer to find out than all else here."""
    return get_type_hints(cls)


def _read(name: str, key: str, kind: Any, text: str) -> object:
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ConfigError(f"{name}: {key} must be one of {[*get_args(kind)]}, got {text!r}")
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise ConfigError(f"{name}: {key} must be true or false, got {text!r}")
        return text == "true"
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name}: {key} must be of type {kind.__name__}, got {text!r}") from None
