"""Text as numbered characters: Python's own standard library, or Tiny Shakespeare from a folder."""

import string
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.bench.data.draw import numbers_below
from laconic.bench.data.source import Source
from laconic.errors import ConfigError

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
"""Those of the alphabet, and one for all others."""
_OFFICIAL = 1_115_394
_SYNTHETIC = 4000
# Every module keeps back one part in so many, Shakespeare's plays one in ten, as is the custom.
_MODULE_PARTS, _PLAY_PARTS = 20, 10


class Text(NamedTuple):
    """Characters as numbers; what is held out is the end of every module or of the plays."""

    training: Tensor
    held_out: Tensor


def find_text(folder: Path | None, device: str, synthetic: bool) -> Text:
    """Tiny Shakespeare where its folder is given, and else what needs none."""
    if synthetic:
        return synthetic_text(device)
    return read_library(device) if folder is None else read_shakespeare(folder, device)


@cache
def read_library(device: str = "cpu") -> Text:
    """The modules' source, from the interpreter that runs us."""
    folder = Path(sysconfig.get_path("stdlib"))
    pairs = [_cut(_read_module(folder / f"{name}.py"), _MODULE_PARTS) for name in sorted(MODULES)]
    training, held_out = zip(*pairs, strict=True)
    return Text(torch.cat(training).to(device), torch.cat(held_out).to(device))


@cache
def read_shakespeare(folder: Path, device: str, characters: int = _OFFICIAL) -> Text:
    path = SHAKESPEARE.find(folder, "input.txt")
    text = SHAKESPEARE.read_text(path)
    SHAKESPEARE.check_count(path, "characters", len(text), characters)
    return Text(*_cut(_numbers(text).to(device), _PLAY_PARTS))


@cache
def synthetic_text(device: str) -> Text:
    """Every character is followed by one of the next four."""
    steps = 1 + numbers_below(4, _SYNTHETIC, device, 5)
    return Text(*_cut(steps.cumsum(0) % SYMBOLS, 5))


def _cut(text: Tensor, parts: int) -> tuple[Tensor, Tensor]:
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
