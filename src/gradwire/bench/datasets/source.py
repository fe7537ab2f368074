"""Files of a data set; errors name the file, the problem and where to get the data."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from gradwire.errors import ConfigError

Arrays = Mapping[str, np.ndarray]

_UNPACK = {".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress}


@dataclass(frozen=True)
class Source:
    """A public data set; `folders` are the names that its own folder may have in a data folder."""

    name: str
    folders: tuple[str, ...]
    home: str

    def find(self, folder: Path | None, *names: str) -> Path:
        """Returns the first file that exists, in `folder` or in the set's own folder inside it."""
        if folder is None:
            raise ConfigError(
                f"{self.name}: name its folder with --data DIR (get it from {self.home}), "
                "or set synthetic=true"
            )
        found = self.find_optional(folder, *names)
        if found is None:
            expected = " or ".join(names)
            raise ConfigError(f"{self.name}: no {expected} in {folder}; get it from {self.home}")
        return found

    def find_optional(self, folder: Path, *names: str) -> Path | None:
        places = [folder, *(folder / name for name in self.folders)]
        paths = (place / name for place in places for name in names)
        return next((path for path in paths if path.exists()), None)

    def read(self, path: Path) -> bytes:
        """Returns the content of a file, decompressed if its name ends in .gz, .xz or .bz2."""
        content = self.read_packed(path)
        unpack = _UNPACK.get(path.suffix, bytes)
        try:
            return unpack(content)
        # A damaged .bz2 is an OSError or a ValueError.
        except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as error:
            raise self.file_error(path, f"cannot be unpacked: {error}") from error

    def read_packed(self, path: Path) -> bytes:
        """Returns the content of a file as it is stored."""
        try:
            return path.read_bytes()
        except OSError as error:
            raise self.file_error(path, f"cannot be read: {error.strerror}") from error

    def read_text(self, path: Path) -> str:
        try:
            return self.read(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.file_error(path, f"is not UTF-8 text from byte {error.start}") from error

    def read_numbers(self, path: Path, columns: int, separator: str = "\t") -> np.ndarray:
        """Reads lines of `columns` whole numbers each, as rows."""
        rows = [line.split(separator) for line in self.read_text(path).splitlines()]
        for number, row in enumerate(rows, start=1):
            if len(row) != columns or not all(word.strip().isdecimal() for word in row):
                raise self.file_error(path, f"line {number}: expected {columns} whole numbers")
        return np.array(rows, dtype=np.int64).reshape(-1, columns)

    def read_arrays(self, path: Path, *names: str) -> Arrays:
        """Reads arrays of an .npz file, none of which may hold Python objects."""
        content = self.read(path)
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                return {name: file[name] for name in names}
        except (BadZipFile, EOFError, KeyError, ValueError, zlib.error) as error:
            raise self.file_error(
                path, f"is not an .npz file with {', '.join(names)}: {error}"
            ) from error

    def check_count(self, path: Path, noun: str, got: int, official: int) -> None:
        if got != official:
            raise self.file_error(path, f"has {got:,} {noun}, the official file {official:,}")

    def file_error(self, path: Path, why: str) -> ConfigError:
        """Returns the error to raise for a file that exists but has the wrong content."""
        return ConfigError(f"{self.name}: {path} {why}; get it again from {self.home}")
