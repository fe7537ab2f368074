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

from gradwire.bench.records.schema import (
    KINDS,
    OTHERS,
    UNVERSIONED,
    VERSION,
    AnyRecord,
    Record,
)
from gradwire.errors import ConfigError

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger("gradwire")

STANDARD_OUTPUT = Path("-")
"""Records go to standard output in place of a file; it has no earlier ones."""

_LARGEST = 10**18
"""The largest magnitude of whole numbers in records."""


def append(path: Path, record: object) -> None:
    """Appends one line to `path` and waits until it is on disk; earlier lines are not changed."""
    append_row(path, to_row(record))


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Appends a JSON object as `append` does a record, or prints it."""
    line = json.dumps(row, allow_nan=False) + "\n"
    if path == STANDARD_OUTPUT:
        print(line, end="", flush=True)
        return
    with _open(path) as file:
        size = file.tell()
        # A killed run may have left half a line; without a newline this record would be lost too.
        torn = size > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
        try:
            _write(file.fileno(), ("\n" * torn + line).encode())
        except OSError as error:
            # Remove a record that was written only in part.
            with suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise _unwritable(path, error) from error


def check_writable(path: Path) -> None:
    """Raises ConfigError if records could not be appended to `path`, or not be read back.

    Called before hours of work whose records would be lost.
    """
    if path == STANDARD_OUTPUT:
        return
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
    """Writes all of `content` to the disk; a single write may store less than it was given."""
    while content:
        content = content[os.write(descriptor, content) :]
    os.fsync(descriptor)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write records to {path}: {error.strerror}")


def files_in(paths: Iterable[Path]) -> list[Path]:
    """Returns the files among `paths`, and all *.jsonl below the folders among them, each once."""
    found: dict[str, Path] = {}
    for path in paths:
        files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"no files of records (*.jsonl) in the folder {path}")
        for file in files:
            # Not Path.resolve, which raises on a loop of links; the error then has no file name.
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def read(paths: Iterable[Path]) -> list[Record]:
    """Reads the runs and kernels of every file, in order; skips other kinds of records."""
    return [record for path in paths for record in read_kinds(path, KINDS, tuple(OTHERS))]


def read_every(paths: Iterable[Path]) -> list[AnyRecord]:
    """Reads every record of every file, in order, whatever its kind."""
    kinds: Mapping[str, type[AnyRecord]] = {**KINDS, **OTHERS}
    return [r for path in paths for r in read_kinds(path, kinds, unversioned=UNVERSIONED)]


def read_kinds(
    path: Path,
    kinds: Mapping[str, type[R]],
    others: Collection[str] = (),
    unversioned: Collection[str] = (),
) -> list[R]:
    """Reads the records of `kinds`; skips those of `others`, and refuses all that remain.

    A record of an `unversioned` kind may lack a version, which is 1 then.
    """
    found = []
    for where, row in _rows(path):
        if isinstance(row, _CutOff):
            log.warning("%s: skipped, since the line is cut off: %s", where, row.why)
        elif row.get("kind") not in others:
            found.append(_record(_with_version(row, unversioned), where, kinds))
    return found


class _CutOff(NamedTuple):
    """An incomplete line that a killed run left."""

    why: str


def _rows(path: Path) -> list[tuple[str, dict[str, object] | _CutOff]]:
    """Returns the content of every line of a file, with the line's location."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no such file of records: {path}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not JSON lines, but a binary file") from None
    except OSError as error:
        raise ConfigError(f"cannot read records from {path}: {error.strerror}") from error
    # Not splitlines(): a JSON string may hold Unicode line separators.
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
    except RecursionError:
        raise ConfigError(f"{where}: not a record: nested too deeply") from None
    except ValueError as error:  # a number with more digits than Python reads
        raise ConfigError(f"{where}: not a record: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: not a record, expected a JSON object, got {line[:40]!r}")
    return row


def _with_version(row: dict[str, object], unversioned: Collection[str]) -> dict[str, object]:
    return {"version": 1, **row} if row.get("kind") in unversioned else row


def _check_version(row: Mapping[str, object], where: str) -> None:
    """Raises ConfigError for a record of another format version."""
    version = row.get("version", VERSION)
    if version != VERSION:
        raise ConfigError(
            f"{where}: record format version {version}, this gradwire reads {VERSION}; "
            "name another file, or use the gradwire that wrote this one"
        )


def _with_package_name(row: Mapping[str, object]) -> Mapping[str, object]:
    """Returns `row` with today's name of this package in `machine` and `command`.

    Records from before the package was renamed have the name "laconic" there.
    """
    machine, command = row.get("machine"), row.get("command")
    renamed = dict(row)
    if isinstance(machine, dict):
        items = machine.items()
        renamed["machine"] = {"gradwire" if k == "laconic" else k: v for k, v in items}
    if isinstance(command, str):
        renamed["command"] = command.replace("laconic", "gradwire")
    return renamed


def _record(row: Mapping[str, object], where: str, kinds: Mapping[str, type[R]]) -> R:
    kind = row.get("kind")
    # Checked first, since another version may have other kinds.
    _check_version(row, where)
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{where}: unknown kind {kind!r}, expected {list(kinds)}")
    if "version" not in row:
        raise ConfigError(f"{where}: {kind} record without the version of its format")
    try:
        return from_row(kinds[kind], _with_package_name(row))
    except RowError as error:
        raise ConfigError(f"{where}: {kind} record {error}") from None


class RowError(ValueError):
    """A row does not match its dataclass; the message names the field and the reason."""


def to_row(record: object) -> dict[str, object]:
    """Returns the fields of `record`; NaN and infinities, which JSON lacks, become null."""
    assert is_dataclass(record)
    assert not isinstance(record, type)
    return {name: finite(value) for name, value in asdict(record).items()}


def from_row(kind: type[T], row: Mapping[str, object]) -> T:
    """Builds a `kind` from `row`; the inverse of `to_row`, but a null float reads as NaN.

    Fields with a default may be missing: they were added after the first records.
    """
    # get_type_hints resolves annotations at run time, so the hints are untyped.
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
    """Returns `value` with None for every number that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _value(name: str, value: object, hint: Any) -> object:
    """Converts `value` to its annotated type, or raises RowError with the field's name."""
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
    # bool is a subclass of int, but a step count of `true` is a mistake.
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _float(name, value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        # Reports compute with floats, which longer numbers would overflow.
        if hint is int and abs(cast(int, value)) > _LARGEST:
            raise RowError(f"field {name!r} must be at most {_LARGEST:.0e}, got a larger number")
        return value
    raise RowError(f"field {name!r} must be {hint.__name__}, got {value!r}")


def _float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise RowError(f"field {name!r} must be a float, got one beyond its range") from None
