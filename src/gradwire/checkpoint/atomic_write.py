"""Writes a state to a file that is on disk and known to load before it gets its name."""

import hashlib
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, cast

import torch
from torch import Tensor, nn

from gradwire.errors import ConfigError

HASH_DIGITS = 16
DRAFT_SUFFIX = ".tmp"
FILE_SUFFIX = ".pt"

_READ_BYTES = 1 << 20


def write_atomically(stem: Path, state: Mapping[str, object]) -> Path:
    """Writes a state, and returns its path: the stem, a hash of the content, and a suffix.

    When this returns, the file survives a crash of the machine. Raises ConfigError if
    `torch.load(weights_only=True)` would refuse the file; no error leaves a draft behind.
    """
    draft = stem.with_name(f"{stem.name}-{secrets.token_hex(8)}{DRAFT_SUFFIX}")
    # With O_EXCL the name must be new: a symbolic link there is not followed.
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            digest = _write(file, state)
            file.flush()
            os.fsync(file.fileno())
        _check_loads(draft, state)
        path = stem.with_name(f"{stem.name}-{digest}{FILE_SUFFIX}")
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    sync_folder(path.parent)
    return path


def hash_of(path: Path) -> str:
    """Returns the hash that the name of an intact file ends in."""
    content = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            content.update(block)
    return content.hexdigest()[:HASH_DIGITS]


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _HashingWriter:
    """Passes to a file what torch writes, in order, and hashes it on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.content = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.content.update(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _write(file: IO[bytes], state: Mapping[str, object]) -> str:
    """Writes the state and returns its hash."""
    writer = _HashingWriter(file)
    try:
        torch.save(dict(state), cast(IO[bytes], writer))
    except Exception as error:
        if writer.error is not None:
            # torch raises a RuntimeError about positions in the file instead.
            raise writer.error from None
        part = _refused_part(state, "state")
        if part is None:
            raise
        raise ConfigError(f"{part}, which cannot be saved") from error
    return writer.content.hexdigest()[:HASH_DIGITS]


def _check_loads(path: Path, state: Mapping[str, object]) -> None:
    """Loads the structure of a file; the tensors' bytes are mapped, and not read."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:
        part = _refused_part(state, "state") or "the state has a part"
        raise ConfigError(
            f"{part}, which torch.load refuses with weights_only=True; "
            "save tensors, numbers, strings, and lists and dicts of them"
        ) from error


_ACCEPTED = (Tensor, nn.Parameter, dict, list, tuple, str, int, float, bool, type(None))


def _refused_part(value: object, path: str) -> str | None:
    """Returns the path and type of a part that cannot be saved and loaded; None if there is none.

    Parts are tried one by one, so it is called only once the whole state was refused.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            found = _refused_part(key, f"a key of {path}")
            if found := found or _refused_part(item, f"{path}[{key!r}]"):
                return found
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if found := _refused_part(item, f"{path}[{index}]"):
                return found
    kind = type(value)
    if kind in _ACCEPTED or _loads(value):
        return None
    return f"{path} is a {kind.__module__}.{kind.__qualname__}"


def _loads(value: object) -> bool:
    with TemporaryFile() as file:
        try:
            torch.save(value, file)
            file.seek(0)
            torch.load(file, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception:
            return False
    return True
