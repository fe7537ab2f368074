"""Text as token ids: characters of Tiny Shakespeare or of Python's standard library, and words.

The word corpora are Penn Treebank (Mikolov 2010) and WikiText-2 (2016). Blanks separate words, and
the end of a line is a word too. Both corpora replace rare words by <unk>, so the training text
holds the whole vocabulary.
"""

import string
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.bench.datasets.sampling import random_integers
from gradwire.bench.datasets.source import Source
from gradwire.errors import ConfigError

SHAKESPEARE = Source(
    "Tiny Shakespeare",
    ("tinyshakespeare",),
    "https://github.com/karpathy/char-rnn (data/tinyshakespeare/input.txt)",
)
# In every Python since 3.10 as one file; 1.2 MB.
MODULES = (
    "argparse", "ast", "configparser", "dataclasses", "difflib", "doctest", "enum", "functools",
    "inspect", "ipaddress", "shutil", "statistics", "subprocess", "tarfile", "threading", "typing",
)  # fmt: skip
ALPHABET = "\n" + string.ascii_letters + string.digits + string.punctuation + " "
SYMBOLS = len(ALPHABET) + 1
"""The size of the alphabet, plus one symbol for all other characters."""
_OFFICIAL = 1_115_394
_SYNTHETIC_CHARACTERS = 4000
# Held out: the last 1/20 of every module, and the last 1/10 of Shakespeare's plays, as is usual.
_MODULE_PARTS, _PLAY_PARTS = 20, 10


class Text(NamedTuple):
    """Characters as ids; the end of every module or of the plays is held out."""

    training: Tensor
    held_out: Tensor


def find_text(folder: Path | None, device: str, synthetic: bool) -> Text:
    """Reads Tiny Shakespeare from its folder, or without a folder the standard library."""
    if synthetic:
        return synthetic_text(device)
    return read_library(device) if folder is None else read_shakespeare(folder, device)


@cache
def read_library(device: str = "cpu") -> Text:
    """Reads the source of `MODULES` from the running interpreter."""
    folder = Path(sysconfig.get_path("stdlib"))
    pairs = [_split(_read_module(folder / f"{name}.py"), _MODULE_PARTS) for name in sorted(MODULES)]
    training, held_out = zip(*pairs, strict=True)
    return Text(torch.cat(training).to(device), torch.cat(held_out).to(device))


@cache
def read_shakespeare(folder: Path, device: str, characters: int = _OFFICIAL) -> Text:
    path = SHAKESPEARE.find(folder, "input.txt")
    text = SHAKESPEARE.read_text(path)
    SHAKESPEARE.check_count(path, "characters", len(text), characters)
    return Text(*_split(_numbers(text).to(device), _PLAY_PARTS))


@cache
def synthetic_text(device: str) -> Text:
    """Makes text in which every character is followed by one of the next four."""
    steps = 1 + random_integers(4, _SYNTHETIC_CHARACTERS, device, 5)
    return Text(*_split(steps.cumsum(0) % SYMBOLS, 5))


def _split(text: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    cut = len(text) - len(text) // parts
    return text[:cut], text[cut:]


def _read_module(path: Path) -> Tensor:
    try:
        return _numbers(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the standard library's source is read as text, but {path}: {error.strerror}"
        ) from error


def _numbers(text: str) -> Tensor:
    number = {symbol: index for index, symbol in enumerate(ALPHABET)}
    return torch.tensor([number.get(symbol, len(ALPHABET)) for symbol in text])


_END = "<eos>"
_SYNTHETIC_WORDS = 6000


class Part(NamedTuple):
    """The possible names of a file, and the number of words in the official one."""

    names: tuple[str, ...]
    words: int


@dataclass(frozen=True)
class Corpus:
    source: Source
    training: Part
    test: Part
    vocabulary: int


class Words(NamedTuple):
    training: Tensor
    held_out: Tensor


PTB = Corpus(
    Source(
        "Penn Treebank",
        ("ptb", "simple-examples/data", "data"),
        "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    ),
    training=Part(("ptb.train.txt",), 929_589),
    test=Part(("ptb.test.txt",), 82_430),
    vocabulary=10_000,
)
WIKITEXT2 = Corpus(
    Source(
        "WikiText-2",
        ("wikitext-2",),
        "https://huggingface.co/datasets/Salesforce/wikitext (wikitext-2-v1)",
    ),
    training=Part(("wiki.train.tokens", "train.txt", "train.txt.xz"), 2_088_628),
    test=Part(("wiki.test.tokens", "test.txt", "test.txt.xz"), 245_569),
    vocabulary=33_278,
)


@cache
def read_words(corpus: Corpus, folder: Path | None, device: str) -> Words:
    """Reads both parts as word ids, in the order of first appearance in the training text."""
    numbers: dict[str, int] = {}
    path, words = _read_part(corpus, folder, corpus.training)
    training = [numbers.setdefault(word, len(numbers)) for word in words]
    corpus.source.check_count(path, "different words", len(numbers), corpus.vocabulary)
    path, words = _read_part(corpus, folder, corpus.test)
    if unknown := next((word for word in words if word not in numbers), None):
        raise corpus.source.file_error(path, f"has {unknown!r}, which is not in the training text")
    held_out = [numbers[word] for word in words]
    return Words(torch.tensor(training, device=device), torch.tensor(held_out, device=device))


@cache
def synthetic_words(vocabulary: int, device: str, count: int = _SYNTHETIC_WORDS) -> Words:
    """Makes text in which every word is followed by one of the next four."""
    steps = 1 + random_integers(4, count, device, 4)
    text = steps.cumsum(0) % vocabulary
    cut = count * 4 // 5
    return Words(text[:cut], text[cut:])


def _read_part(corpus: Corpus, folder: Path | None, part: Part) -> tuple[Path, list[str]]:
    path = corpus.source.find(folder, *part.names)
    words = corpus.source.read_text(path).replace("\n", f" {_END} ").split()
    corpus.source.check_count(path, "words", len(words), part.words)
    return path, words
