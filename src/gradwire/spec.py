"""Spec strings to objects and back: "topk:ratio=0.01 | qsgd:bits=4".

Names are those of `gradwire.registry`; specs may have hyphens or underscores.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from gradwire.base import (
    Aggregator,
    Compressor,
    Exchange,
    Memory,
    MultiRound,
    OneRound,
    TwoLevelExchange,
)
from gradwire.base.aggregation import UNKNOWN, check_ranks, least_ranks, tolerated
from gradwire.compressors._nested import NestedSelection
from gradwire.compressors._sparsifier import Pipeline, Sparsifier
from gradwire.errors import ConfigError
from gradwire.identity import class_name, identity_of, is_own
from gradwire.registry import COMPRESSORS, EXCHANGES, MEMORIES, Registry, plugin_name, shown

T = TypeVar("T")

POLICY_DEFAULT = "default"
"""The pattern of all parameters that no other pattern of a policy matches."""

MOST_STAGES = 3
"""Stages of a pipeline: two selections, one among the entries of the other, and a quantiser."""

OTHER_NAMES: Mapping[str, str] = {
    "all-gather": "gather",
    "all-reduce": "mean",
    "all-to-all": "sharded",
    "allgather": "gather",
    "allreduce": "mean",
    "alltoall": "sharded",
    "average": "mean",
    "ef": "residual",
    "error-feedback": "residual",
    "reduce-scatter": "sharded",
    "ring": "mean",
    "sum": "mean",
    "two-level": "hierarchical",
}
"""Names under which exchanges and memories are known elsewhere, for hints in errors."""


@dataclass(frozen=True)
class ExchangeConfig:
    """A parsed exchange spec, such as "gather:aggregate=median"."""

    name: str
    settings: tuple[tuple[str, object], ...] = ()
    """Parameters of the exchange other than `node` and `between`."""
    node: int | None = None
    """Ranks per node; None unless the exchange has two levels."""
    between: "ExchangeConfig | None" = None
    """The exchange between nodes; None in a two-level exchange leaves it to be chosen."""

    def __post_init__(self) -> None:
        if self.node is not None and self.node < 1:
            raise ConfigError(f"{self.name}: node must be at least 1, got {self.node}")

    def __str__(self) -> str:
        if self.node is not None:
            return f"{self.name}:node={self.node},between={self.between or 'auto'}"
        settings = ",".join(f"{key}={value}" for key, value in self.settings)
        return f"{self.name}:{settings}" if settings else self.name

    def identity(self) -> dict[str, object]:
        """Returns the class and all its settings, defaults included, as JSON values."""
        cls = find_exchange(self.name)
        if self.node is not None:
            between = self.across_nodes
            # Left open until a plan is made for a number of ranks.
            inner = between.name if between.name == "auto" else between.identity()
            return {"class": class_name(cls), "node": self.node, "between": inner}
        settings = [f for f in fields(cls) if f.name != "codec"]  # type: ignore[arg-type]
        given = dict(self.settings)
        values = {f.name: given.get(f.name, f.default) for f in settings}
        return {"class": class_name(cls), **values}

    @property
    def across_nodes(self) -> "ExchangeConfig":
        """The exchange between nodes, or this one if it has one level."""
        return self if self.node is None else self.between or ExchangeConfig("auto")

    @property
    def aggregate(self) -> object:
        """The name of the aggregation of all ranks' gradients."""
        return dict(self.across_nodes.settings).get("aggregate", "mean")

    def tolerated(self, ranks: int) -> int:
        """Returns how many ranks may send arbitrary values without effect on the result."""
        # A node with a faulty rank is lost as a whole.
        return tolerated(str(self.aggregate), ranks // (self.node or 1), self._faulty)

    def check_ranks(self, ranks: int) -> None:
        """Raises ConfigError if the aggregation needs more ranks, or nodes, than these."""
        check_ranks(str(self.aggregate), ranks // (self.node or 1), self._faulty)

    @property
    def least_ranks(self) -> int:
        """The smallest number of ranks that can exchange."""
        return (self.node or 1) * least_ranks(str(self.aggregate), self._faulty)

    @property
    def _faulty(self) -> int:
        """The number of faulty ranks that the aggregation assumes, as it was given."""
        faulty = dict(self.across_nodes.settings).get("faulty", UNKNOWN)
        assert isinstance(faulty, int)
        return faulty

    def dense(self) -> "ExchangeConfig":
        """Returns the exchange of a step that sends everything: a mean, or the same aggregate."""
        if self.node is not None:
            return replace(self, between=self.across_nodes.dense())
        return self if self.settings else ExchangeConfig("mean")

    def wrap(self, compressor: Compressor) -> Aggregator:
        """Puts a compressor into this exchange, unless it defines its own rounds."""
        cls = find_exchange(self.name)
        if self.node is not None:
            assert issubclass(cls, TwoLevelExchange)
            return cls(self.across_nodes.wrap(compressor), self.node)
        if isinstance(compressor, MultiRound):
            return compressor
        return cls(codec=compressor, **dict(self.settings))  # type: ignore[arg-type]


def compressor_classes() -> Mapping[str, type[Compressor]]:
    """Returns the compressors of this package by name."""
    return COMPRESSORS.own()


def memory_classes() -> Mapping[str, type[Memory]]:
    """Returns the memories of this package by name."""
    return MEMORIES.own()


def exchange_classes() -> Mapping[str, type[Exchange]]:
    """Returns the exchanges of this package by name."""
    return EXCHANGES.own()


def methods() -> list[str]:
    """Returns the names of all compressors, those of plug-ins included."""
    return COMPRESSORS.names()


def parse(spec: str) -> Compressor:
    """Returns the compressor that a spec string describes."""
    _check_text("compressor", spec)
    if is_policy_text(spec):
        raise ConfigError(_one_method(spec))
    stages = [build_from(COMPRESSORS, stage) for stage in spec.split("|")]
    if len(stages) == 1:
        return stages[0]
    if len(stages) > MOST_STAGES:
        raise ConfigError(
            f"a pipeline has at most {MOST_STAGES} stages, got {len(stages)} in {spec!r}: one or "
            "two sparsifiers, and a method of one message that encodes the values they select"
        )
    first, *nested, last = stages
    if not isinstance(first, Sparsifier):
        raise ConfigError(
            f"{spec!r}: a pipeline starts with a sparsifier, {name_of(first)} is none"
        )
    if not isinstance(last, OneRound) or isinstance(last, Sparsifier):
        raise ConfigError(f"{spec!r}: a pipeline ends with a quantiser, {name_of(last)} is none")
    for inner in nested:
        if not isinstance(inner, Sparsifier):
            raise ConfigError(
                f"{spec!r}: the second of three stages is a sparsifier, {name_of(inner)} is none"
            )
        first = NestedSelection(first, inner)
    return Pipeline(first, last)


def is_policy_text(spec: str) -> bool:
    """Returns whether a string gives parameters methods by patterns (`gradwire.policies`)."""
    head = spec.partition(":")[0].strip()
    return ";" in spec or head == POLICY_DEFAULT or any(mark in head for mark in "\"'*?[")


def _one_method(given: object) -> str:
    return f"expected one method for all parameters, got policies by name: {given!r}"


def compressor_of(compressor: Compressor | str) -> Compressor:
    """Returns the compressor itself, or the one that a spec string describes."""
    if isinstance(compressor, str):
        return parse(compressor)
    if isinstance(compressor, Mapping):
        raise ConfigError(_one_method(dict(compressor)))
    if not isinstance(compressor, Compressor):
        raise ConfigError(f"expected a spec string or a compressor, got {_described(compressor)}")
    return compressor


def memory_of(memory: Memory | str) -> Memory:
    """Returns the memory itself, or the one that a spec string describes."""
    if isinstance(memory, str):
        return parse_memory(memory)
    if not isinstance(memory, Memory):
        raise ConfigError(f"expected a memory or its spec, got {_described(memory)}")
    return memory


def parse_memory(spec: str) -> Memory:
    return build_from(MEMORIES, spec)


def find_exchange(spec: str) -> type[Exchange]:
    """Returns the class that an exchange's spec names."""
    _check_text("exchange", spec)
    return _find(EXCHANGES, spec.partition(":")[0].strip())


def parse_exchange(spec: str) -> ExchangeConfig:
    """Parses an exchange's spec; raises ConfigError for unknown names and settings."""
    cls = find_exchange(spec)
    name, texts = read_settings(spec)
    name = shown(name)
    if issubclass(cls, TwoLevelExchange):
        known = typed_settings(name, _TwoLevelSettings, texts)
        between = str(known.get("between", "auto"))
        node = known["node"]
        assert isinstance(node, int)
        if between == "auto":
            return ExchangeConfig(name, (), node)
        if issubclass(find_exchange(between), TwoLevelExchange):
            raise ConfigError(f"{name}: between must have one level, got {between!r}")
        return ExchangeConfig(name, (), node, parse_exchange(between))
    return ExchangeConfig(name, tuple(typed_settings(name, cls, texts, "codec").items()))


@dataclass(frozen=True)
class _TwoLevelSettings:
    node: int
    between: str = "auto"

    examples: ClassVar = ({"node": 8},)


def exchange_of(exchange: ExchangeConfig | str) -> ExchangeConfig:
    """Returns the config itself, or the one that a spec string describes."""
    return exchange if isinstance(exchange, ExchangeConfig) else parse_exchange(exchange)


def build_from(registry: Registry[T], spec: str) -> T:
    """Builds the item that a spec string describes from a class of a registry."""
    _check_text(registry.noun, spec)
    name = spec.partition(":")[0].strip()
    cls = _find(registry, name)
    texts = read_settings(spec, example_of(shown(name), cls))[1]
    return from_settings(shown(name), cls, texts)


def name_of(item: object) -> str:
    """Returns the name of an item: that of its class in the registry, or else the class."""
    if type(item) is Pipeline:
        return f"{name_of(item.sparsifier)}|{name_of(item.quantiser)}"
    if type(item) is NestedSelection:
        return f"{name_of(item.outer)}|{name_of(item.inner)}"
    cls = type(item)
    if is_own(cls):
        return shown(cls.__module__.rpartition(".")[2])
    return plugin_name(cls) or class_name(cls)


def format_spec(item: object) -> str:
    """Returns the spec string of an item, without parameters that have their default value.

    An item of a class outside the package that has no name is described by its class and all its
    parameters, since nothing else defines their defaults; that string cannot be parsed.
    """
    if type(item) is Pipeline:
        return f"{format_spec(item.sparsifier)} | {format_spec(item.quantiser)}"
    if type(item) is NestedSelection:
        return f"{format_spec(item.outer)} | {format_spec(item.inner)}"
    if isinstance(item, type) or not is_dataclass(item):
        raise ConfigError(f"format_spec: expected a compressor or a memory, got {_described(item)}")
    if not is_own(type(item)) and plugin_name(type(item)) is None:
        values = [(key, value) for key, value in identity_of(item).items() if key != "class"]
        return _spec(name_of(item), [f"{key}={json.dumps(value)}" for key, value in values])
    settings = []
    for f in fields(item):
        value = getattr(item, f.name)
        if f.default is MISSING or value != f.default:
            settings.append(_setting(f.name, value))
    return _spec(name_of(item), settings)


def _setting(key: str, value: object) -> str:
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _spec(name: str, settings: Sequence[str]) -> str:
    return f"{name}:{','.join(settings)}" if settings else name


def _check_text(noun: str, spec: object) -> None:
    """Raises ConfigError unless a spec is a string."""
    if not isinstance(spec, str):
        raise ConfigError(f"{noun}: a spec must be a string, got {_described(spec)}")


def _described(item: object) -> str:
    """Describes a wrong argument; for a class of the catalogue, shows how to instantiate it."""
    known: list[type[Compressor | Memory]] = [
        *compressor_classes().values(),
        *memory_classes().values(),
    ]
    for cls in known:
        if cls is item:
            settings = ", ".join(f"{key}={value!r}" for key, value in cls.examples[0].items())
            return f"the class {cls.__name__}; make one, like {cls.__name__}({settings})"
    return repr(item)


def read_settings(spec: str, example: str = "") -> tuple[str, dict[str, str]]:
    """Splits "name:key=value,key=value" into the name and the settings, as text."""
    name, colon, rest = spec.strip().partition(":")
    if colon and not rest.strip():
        raise ConfigError(f"{name}: nothing after the colon in {spec!r}")
    texts: dict[str, str] = {}
    for setting in filter(None, (s.strip() for s in rest.split(","))):
        key, equals, value = setting.partition("=")
        if not equals or not value.strip():
            hint = f"; an example is {example!r}" if "=" in example else ""
            raise ConfigError(f"{name}: expected key=value, got {setting!r} in {spec!r}{hint}")
        if key.strip() in texts:
            raise ConfigError(f"{name}: {key.strip()} is set twice in {spec!r}")
        texts[key.strip()] = value.strip()
    return name.strip(), texts


def _find(registry: Registry[T], name: str) -> type[T]:
    found = registry.find(name)
    if found is None:
        hint = _hint(registry, name)
        raise ConfigError(f"no {registry.noun} named {name!r}; {hint}")
    return found


def _hint(registry: Registry[T], name: str) -> str:
    """Returns what a wrong name may have meant, or else all names."""
    if re.fullmatch(r"[^\W\d]\w*(\.[\w<>]+)+", name):
        return f"a {registry.noun} of your own is given as an object, or by its registered name"
    first, *rest = [*filter(None, re.split(r"[\s,;=@()]+", name))] or [""]
    first, catalogue = shown(first).lower(), registry.names()
    close = [OTHER_NAMES[first]] if OTHER_NAMES.get(first) in catalogue else []
    close = close or get_close_matches(first, catalogue, n=1, cutoff=0.5)
    if not close:
        return f"there are {', '.join(catalogue)}"
    if not rest or close[0] not in registry.own():
        return f"did you mean {close[0]!r}?"
    cls = registry.own()[close[0]]
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if len(rest) % 2 or not known.issuperset(rest[::2]):
        return f"settings follow a colon, as in {example_of(close[0], cls)!r}"
    settings = [f"{key}={value}" for key, value in zip(rest[::2], rest[1::2], strict=True)]
    return f"settings follow a colon, as in {_spec(close[0], settings)!r}"


def example_of(name: str, cls: type[object]) -> str:
    """Returns an example of a spec: the first of the class that has settings, or their types."""
    examples: Sequence[Mapping[str, object]] = getattr(cls, "examples", ())
    for example in filter(None, examples):
        return _spec(name, [_setting(key, value) for key, value in example.items()])
    required = [f.name for f in fields(cls) if _is_required(f)]  # type: ignore[arg-type]
    types = _types_of(cls)  # type: ignore[arg-type]
    return _spec(name, [f"{key}=<{types[key].__name__}>" for key in required if not examples])


def _is_required(field: Field[Any]) -> bool:
    return field.init and field.default is MISSING and field.default_factory is MISSING


def from_settings(name: str, cls: type[T], texts: Mapping[str, str], **given: object) -> T:
    """Builds an instance from settings given as text, and from other fields given as they are."""
    return cls(**given, **typed_settings(name, cls, texts, *given))


def typed_settings(
    name: str, cls: type[object], texts: Mapping[str, str], *reserved: str
) -> dict[str, object]:
    """Reads settings given as text, each as its field's type; `reserved` fields are not set."""
    known = {f.name: f for f in fields(cls) if f.name not in reserved}  # type: ignore[arg-type]
    unknown = sorted(texts.keys() - known.keys())
    if unknown:
        raise ConfigError(f"{name}: unknown parameter {unknown}, expected {sorted(known)}")
    missing = [k for k, f in known.items() if _is_required(f) and k not in texts]
    if missing:
        shown = example_of(name, cls)
        raise ConfigError(f"{name}: missing parameter {missing}, as in {shown!r}")
    types = _types_of(cls)  # type: ignore[arg-type]
    return {key: _read(name, key, types[key], text) for key, text in texts.items()}


@cache
def _types_of(cls: type) -> Mapping[str, Any]:
    """Resolves the annotations of a class; cached, since it is the slow part of parsing."""
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
        hint = "; settings are separated by commas" if "=" in text else ""
        raise ConfigError(
            f"{name}: {key} must be of type {kind.__name__}, got {text!r}{hint}"
        ) from None
