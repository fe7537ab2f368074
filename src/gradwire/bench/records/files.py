"""Reads and writes files of records: one JSON object per line, one dataclass per object.

Every field is checked against its annotation, so an error names the file, the line and the field.
"""

import json
import logging
import math
import os
import types
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import (
    Any,
    BinaryIO,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from gradwire.errors import ConfigError

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


R = TypeVar("R")

VERSION = 1
"""Of the format of records; those of another are refused."""

log = logging.getLogger("gradwire")


def append(path: Path, record: object) -> None:
    """Adds one line to `path` and waits until it is on disk; earlier lines stay as they are."""
    line = json.dumps(to_row(record), allow_nan=False) + "\n"
    with _open(path) as file:
        size = file.tell()
        # A killed run may have left half a line; without a newline this record is lost too.
        torn = size > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
        try:
            _write(file.fileno(), ("\n" * torn + line).encode())
        except OSError as error:
            # Half a record is of no use to anybody.
            with suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise _unwritable(path, error) from error


def check_writable(path: Path) -> None:
    """Raises before hours of work whose records could not be kept, or not be read among others."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot write records to {path}: not a regular file")
    _open(path).close()
    for where, row in _rows(path):
        if not isinstance(row, _CutOff):
            _check_version(row, where)


def _open(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return cast(BinaryIO, path.open("ab+", buffering=0))
    except OSError as error:
        raise _unwritable(path, error) from error


def _write(descriptor: int, content: bytes) -> None:
    """All of it, to the disk itself; what a disk has room for may be less than was asked."""
    while content:
        content = content[os.write(descriptor, content) :]
    os.fsync(descriptor)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write records to {path}: {error.strerror}")


def files_in(paths: Iterable[Path]) -> list[Path]:
    """The files among `paths`, and all *.jsonl below the folders among them, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"no files of records (*.jsonl) in the folder {path}")
        found |= {file.resolve(): file for file in files if file.resolve() not in found}
    return list(found.values())


def read_kinds(
    path: Path,
    kinds: Mapping[str, type[R]],
    others: Collection[str] = (),
    unversioned: Collection[str] = (),
) -> list[R]:
    """The records of some kinds, where others may be among them.

    What is `unversioned` may lack a version, and is of the first one then.
    """
    found = []
    for where, row in _rows(path):
        if isinstance(row, _CutOff):
            log.warning("%s: left out, since it is cut off: %s", where, row.why)
        elif row.get("kind") not in others:
            found.append(_record(_dated(row, unversioned), where, kinds))
    return found


class _CutOff(NamedTuple):
    """The half of a line that a killed run left."""

    why: str


def _rows(path: Path) -> list[tuple[str, dict[str, object] | _CutOff]]:
    """What every line of a file holds, and where that is."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no such file of records: {path}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not JSON lines, but a binary file") from None
    except OSError as error:
        raise ConfigError(f"cannot read records from {path}: {error.strerror}") from error
    # Not splitlines(): a JSON string may hold the line breaks that only Unicode knows.
    lines = enumerate(text.split("\n"), start=1)
    named = [(f"{path} line {number}", line) for number, line in lines if line.strip()]
    return [(where, _row(line, where)) for where, line in named]


def _row(line: str, where: str) -> dict[str, object] | _CutOff:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        if line.startswith('{"kind": "'):
            return _CutOff(error.msg)
        raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: not a record, expected a JSON object, got {line[:40]!r}")
    return row


def _dated(row: dict[str, object], unversioned: Collection[str]) -> dict[str, object]:
    return {"version": 1, **row} if row.get("kind") in unversioned else row


def _check_version(row: Mapping[str, object], where: str) -> None:
    """Raises ConfigError for a record that says another version than ours."""
    version = row.get("version", VERSION)
    if version != VERSION:
        raise ConfigError(
            f"{where}: record format version {version}, this gradwire reads {VERSION}; "
            "name another file, or use the gradwire that wrote this one"
        )


def _record(row: Mapping[str, object], where: str, kinds: Mapping[str, type[R]]) -> R:
    kind = row.get("kind")
    # First, since another version may have other kinds.
    _check_version(row, where)
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{where}: unknown kind {kind!r}, expected {list(kinds)}")
    if "version" not in row:
        raise ConfigError(f"{where}: {kind} record without the version of its format")
    try:
        return from_row(kinds[kind], row)
    except RowError as error:
        raise ConfigError(f"{where}: {kind} record {error}") from None
