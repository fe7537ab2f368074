"""Files of records, a line of JSON each: how lines are added, and read or refused."""

import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar, cast

from laconic.bench.records.jsonl import RowError, from_row, to_row
from laconic.errors import ConfigError

R = TypeVar("R")

VERSION = 1
"""Of the format of records; those of another are refused."""

log = logging.getLogger("laconic")


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
            f"{where}: record format version {version}, this laconic reads {VERSION}; "
            "name another file, or use the laconic that wrote this one"
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
