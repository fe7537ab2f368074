"""A character language model of Python's own standard library: real text, and nothing to download.

The architecture is Bengio et al. 2003: the embeddings of the last characters, two hidden layers.
"""

import string
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, Optimizer

from laconic.bench.workload import Batch, Evaluation, Workload
from laconic.errors import ConfigError

# In every Python since 3.10 as one file; 1.2 MB.
MODULES = (
    "argparse", "ast", "configparser", "dataclasses", "difflib", "doctest", "enum", "functools",
    "inspect", "ipaddress", "shutil", "statistics", "subprocess", "tarfile", "threading", "typing",
)  # fmt: skip
ALPHABET = "\n" + string.ascii_letters + string.digits + string.punctuation + " "
_OTHER = len(ALPHABET)
_HELD_OUT = 20  # every module keeps back one part in so many
_EVALUATED = 2048


class Text(NamedTuple):
    """Characters as numbers; what is held out is the end of every module."""

    training: Tensor
    held_out: Tensor


@dataclass(frozen=True)
class CharLm(Workload):
    """Predicts a character from the `context` before it; 1.1 million parameters by default."""

    batch_size: int = 64
    context: int = 16
    width: int = 32
    hidden: int = 1024
    learning_rate: float = 0.002

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"charlm: batch_size must be at least 1, got {self.batch_size}")

    @property
    def title(self) -> str:
        return "character model of Python's library"

    def build(self) -> nn.Module:
        symbols = len(ALPHABET) + 1
        return nn.Sequential(
            nn.Embedding(symbols, self.width),
            nn.Flatten(),
            nn.Linear(self.context * self.width, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.hidden // 2),
            nn.ReLU(),
            nn.Linear(self.hidden // 2, symbols),
        )

    def optimiser(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=self.learning_rate)

    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        text = read_text().training
        dice = torch.Generator().manual_seed((seed * 1_000_003 + step) * workers + rank)
        starts = torch.randint(len(text) - self.context, (self.batch_size,), generator=dice)
        return self._windows(text, starts)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(output, targets)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """On characters spread evenly over what was held out."""
        text = read_text().held_out
        starts = torch.linspace(0, len(text) - self.context - 1, _EVALUATED).long()
        inputs, targets = self._windows(text, starts)
        with torch.no_grad():
            output = model(inputs)
        right = (output.argmax(1) == targets).float().mean()
        return Evaluation(float(self.loss(output, targets)), "accuracy", float(right))

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts[:, None] + torch.arange(self.context + 1)]  # [examples, context + 1]
        return Batch(windows[:, :-1], windows[:, -1])


@cache
def read_text() -> Text:
    """The modules' source, from the interpreter that runs us."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [_read_module(folder / f"{name}.py") for name in sorted(MODULES)]
    cuts = [len(module) - len(module) // _HELD_OUT for module in modules]
    pairs = list(zip(modules, cuts, strict=True))
    return Text(
        training=torch.cat([module[:cut] for module, cut in pairs]),
        held_out=torch.cat([module[cut:] for module, cut in pairs]),
    )


def _read_module(path: Path) -> Tensor:
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"charlm: reads the standard library's source, but {path}: {error.strerror}"
        ) from error
    number = {symbol: index for index, symbol in enumerate(ALPHABET)}
    return torch.tensor([number.get(symbol, _OTHER) for symbol in source])
