"""Text as byte-level BPE tokens (Radford et al. 2019), by a tokeniser trained on the same text.

A corpus is a folder with `train.txt`, or `train_1.txt`, `train_2.txt` and so on, and `valid.txt`;
each may be packed as .gz, .xz or .bz2. Tokens are cached as uint16 in .npy files, whose names hold
the vocabulary size and a hash of the corpus, so that a later run needs no tokeniser.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradwire.bench.datasets.source import Source
from gradwire.bench.datasets.text import Text
from gradwire.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GUTENBERG = Source(
    "Project Gutenberg",
    ("gutenberg",),
    "https://www.gutenberg.org (any UTF-8 text, as train.txt and valid.txt)",
)
LARGEST_VOCABULARY = 2**16
SMALLEST_VOCABULARY = 256
"""One token for every byte."""

# Part of the names of cached files; increase it where other tokens would come out.
_FORMAT = 1
_TRAINING = re.compile(r"train(_\d+)?\.txt(\.gz|\.xz|\.bz2)?")
_HELD_OUT = ("valid.txt", "valid.txt.gz", "valid.txt.xz", "valid.txt.bz2")
_LINES = 4096

log = logging.getLogger("gradwire")


@cache
def read_tokens(folder: Path, vocabulary: int, cache_folder: Path | None, device: str) -> Text:
    """Reads a corpus as token ids below `vocabulary`; encodes it if the cache does not have it.

    The cache is `cache_folder`, or else a folder beside the corpus, or else, where that cannot be
    written, one in the user's cache directory.
    """
    if not SMALLEST_VOCABULARY <= vocabulary <= LARGEST_VOCABULARY:
        raise ConfigError(
            f"tokens: vocabulary must be from {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY} to "
            f"encode text, got {vocabulary}"
        )
    held_out = GUTENBERG.find(folder, *_HELD_OUT)
    training = _training_files(held_out.parent)
    places = cache_places(held_out.parent, cache_folder)
    name = f"bpe{_FORMAT}-{vocabulary}-{_hash([*training, held_out])}"
    arrays = _cached(places, name, vocabulary) or _encode(training, held_out, vocabulary)
    if not any(_path(place, name, "valid").exists() for place in places):
        _store(places, name, arrays, required=cache_folder is not None)
    # Indexing of uint16 is not available on all devices.
    first, second = (torch.from_numpy(array.astype(np.int32)).to(device) for array in arrays)
    return Text(first, second)


def cache_places(corpus: Path, cache_folder: Path | None) -> tuple[Path, ...]:
    """Returns the folders that may hold cached tokens, the preferred one first."""
    if cache_folder is not None:
        return (cache_folder,)
    return corpus / "gradwire-tokens", Path.home() / ".cache" / "gradwire" / "tokens"


def _training_files(folder: Path) -> list[Path]:
    """Returns the training files in the order of their numbers."""
    found = [path for path in folder.iterdir() if _TRAINING.fullmatch(path.name)]
    if not found:
        raise ConfigError(
            f"{GUTENBERG.name}: no train.txt or train_1.txt in {folder}; get it from "
            f"{GUTENBERG.home}"
        )
    # A file that is there both packed and unpacked counts once.
    by_stem = {path.name.partition(".")[0]: path for path in sorted(found, reverse=True)}
    return sorted(by_stem.values(), key=lambda path: (len(path.name.partition(".")[0]), path.name))


def _hash(files: Sequence[Path]) -> str:
    """Returns a hash of the content of the files, each with its length."""
    digest = sha256()
    for path in files:
        content = GUTENBERG.read_packed(path)
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()[:16]


Arrays = tuple[np.ndarray, np.ndarray]


def _cached(places: Iterable[Path], name: str, vocabulary: int) -> Arrays | None:
    for place in places:
        # Written last, so the other file is complete too.
        if _path(place, name, "valid").exists():
            training, held_out = (_load(_path(place, name, part)) for part in ("train", "valid"))
            largest = max(int(array.max(initial=0)) for array in (training, held_out))
            if largest >= vocabulary:
                raise _damaged(_path(place, name, "train"), f"has a token {largest}")
            return training, held_out
    return None


def _load(path: Path) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error
    if not isinstance(array, np.ndarray) or array.dtype != np.uint16 or array.ndim != 1:
        raise _damaged(path, "is not a list of uint16")
    return array


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"tokens: the cached file {path} {why}; delete it to encode the text again")


def _path(place: Path, name: str, part: str) -> Path:
    return place / f"{name}-{part}.npy"


def _store(places: Sequence[Path], name: str, arrays: Arrays, required: bool) -> None:
    """Writes both files to the first place that accepts them; warns if none does."""
    failures: list[str] = []
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            for part, array in zip(("train", "valid"), arrays, strict=True):
                _write(_path(place, name, part), array)
        except OSError as error:
            failures.append(f"{place}: {error.strerror}")
            continue
        log.info("tokens: cached in %s", place)
        return
    if required:
        raise ConfigError(f"tokens: the cache folder cannot be written, {failures[0]}")
    log.warning("tokens: not cached, since no folder can be written (%s)", "; ".join(failures))


def _write(path: Path, array: np.ndarray) -> None:
    """Replaces the file at once, so that no reader sees a part of it."""
    with NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())
            # Temporary files are private, but other users may read the corpus too.
            os.fchmod(file.fileno(), 0o644)
            Path(file.name).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(file.name).unlink()
            raise


def _encode(training: Sequence[Path], held_out: Path, vocabulary: int) -> Arrays:
    """Trains a tokeniser on the training files, and encodes all files."""
    if find_spec("tokenizers") is None:
        raise MissingExtra("a text as BPE tokens", "tokenizers", "lm")
    packed_mb = sum(path.stat().st_size for path in (*training, held_out)) / 1e6
    log.warning(
        "tokens: training a tokeniser of %d tokens and encoding %.3g MB of files in %s; "
        "later runs use the cached tokens",
        vocabulary,
        packed_mb,
        held_out.parent,
    )
    tokeniser = train_tokeniser(chain.from_iterable(map(_lines, training)), vocabulary)
    train = np.concatenate([encode_lines(tokeniser, _lines(path)) for path in training])
    return train, encode_lines(tokeniser, _lines(held_out))


def _lines(path: Path) -> list[str]:
    return GUTENBERG.read_text(path).splitlines(keepends=True)


def train_tokeniser(lines: Iterable[str], vocabulary: int) -> "Tokenizer":
    """Trains a byte-level BPE with the word pattern of GPT-2 and at most `vocabulary` tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokeniser = Tokenizer(BPE())
    tokeniser.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokeniser.train_from_iterator(lines, trainer)
    return tokeniser


def encode_lines(tokeniser: "Tokenizer", lines: Sequence[str]) -> np.ndarray:
    """Returns the tokens of consecutive lines as uint16."""
    return np.concatenate([np.zeros(0, np.uint16), *_encoded(tokeniser, lines)])


def _encoded(tokeniser: "Tokenizer", lines: Sequence[str]) -> Iterator[np.ndarray]:
    for start in range(0, len(lines), _LINES):
        for encoding in tokeniser.encode_batch_fast([*lines[start : start + _LINES]]):
            yield np.array(encoding.ids, np.uint16)
