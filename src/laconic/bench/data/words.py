"""Texts as numbered words, in the formats of Penn Treebank (Mikolov 2010) and WikiText-2 (2016).

Words stand between blanks; the end of a line is a word too. Both sets have replaced rare words by
<unk>, so the training text holds every word that there is.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.bench.data.draw import numbers_below
from laconic.bench.data.source import Source

_END = "<eos>"
_SYNTHETIC = 6000


class Part(NamedTuple):
    """A file under the names that it may have, and how many words the official one has."""

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
    """Both parts, in words numbered in the order in which the training text brings them."""
    numbers: dict[str, int] = {}
    path, words = _read_part(corpus, folder, corpus.training)
    training = [numbers.setdefault(word, len(numbers)) for word in words]
    corpus.source.check_count(path, "different words", len(numbers), corpus.vocabulary)
    path, words = _read_part(corpus, folder, corpus.test)
    if strange := next((word for word in words if word not in numbers), None):
        raise corpus.source.broken(path, f"has {strange!r}, which is no word of the training text")
    held_out = [numbers[word] for word in words]
    return Words(torch.tensor(training, device=device), torch.tensor(held_out, device=device))


@cache
def synthetic_words(vocabulary: int, device: str) -> Words:
    """Every word is followed by one of the next four."""
    steps = 1 + numbers_below(4, _SYNTHETIC, device, 4)
    text = steps.cumsum(0) % vocabulary
    cut = _SYNTHETIC * 4 // 5
    return Words(text[:cut], text[cut:])


def _read_part(corpus: Corpus, folder: Path | None, part: Part) -> tuple[Path, list[str]]:
    path = corpus.source.find(folder, *part.names)
    words = corpus.source.read_text(path).replace("\n", f" {_END} ").split()
    corpus.source.check_count(path, "words", len(words), part.words)
    return path, words
