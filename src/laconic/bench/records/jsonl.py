"""Frozen dataclasses as JSON rows and back; every field is checked, so that errors name it."""

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class RowError(ValueError):
    """A row does not have the form of its dataclass; the message says which field and why."""


def to_row(record: object) -> dict[str, object]:
    """The fields of `record`; NaN and infinities, which JSON does not have, become null."""
    assert is_dataclass(record)
    assert not isinstance(record, type)
    return {name: finite(value) for name, value in asdict(record).items()}


def from_row(kind: type[T], row: Mapping[str, object]) -> T:
    """A `kind` with the values of `row`; the inverse of `to_row`, but null loss reads as NaN.

    Fields that have a default may be missing: they came after the first records were written.
    """
    # get_type_hints resolves annotations at run time, which is the untyped edge of this file.
    hints: dict[str, Any] = get_type_hints(kind)
    forms = fields(kind)  # type: ignore[arg-type]
    names = [form.name for form in forms]
    needed = [f.name for f in forms if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in row]:
        raise RowError(f"lacks {missing}")
    if unknown := [name for name in row if name not in names]:
        raise RowError(f"has unknown fields {unknown}")
    return kind(**{name: _value(name, row[name], hints[name]) for name in names if name in row})


def finite(value: object) -> object:
    """`value` with null for every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _value(name: str, value: object, hint: Any) -> object:
    """`value` as the annotation wants it, or an error that names the field."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        rest = [item for item in inner if item is not types.NoneType]
        return None if value is None else _value(name, value, rest[0])
    if origin is Literal and value in inner:
        return value
    if origin is tuple and isinstance(value, list):
        return _items(name, value, inner)
    if origin is dict and isinstance(value, dict):
        return {key: _value(f"{name}.{key}", item, inner[1]) for key, item in value.items()}
    if origin is None:
        return _plain(name, value, hint)
    raise RowError(f"field {name!r} must be {hint}, got {value!r}")


def _items(name: str, values: list[object], inner: tuple[Any, ...]) -> tuple[object, ...]:
    if inner[-1] is not Ellipsis and len(values) != len(inner):
        raise RowError(f"field {name!r} must have {len(inner)} items, got {len(values)}")
    hints = [inner[0]] * len(values) if inner[-1] is Ellipsis else inner
    pairs = enumerate(zip(values, hints, strict=True))
    return tuple(_value(f"{name}[{i}]", value, hint) for i, (value, hint) in pairs)


def _plain(name: str, value: object, hint: type) -> object:
    if is_dataclass(hint) and isinstance(value, dict):
        return from_row(hint, value)
    if hint is float and value is None:
        return math.nan
    # bool is an int to Python, but a step count of `true` is a mistake.
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise RowError(f"field {name!r} must be {hint.__name__}, got {value!r}")
