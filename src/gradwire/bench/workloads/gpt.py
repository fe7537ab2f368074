"""A GPT (Radford et al. 2019) on characters: Tiny Shakespeare, or Python's own library."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gradwire.bench.datasets.text import SHAKESPEARE, SYMBOLS, Text, find_text
from gradwire.bench.workloads import _schedules as schedules
from gradwire.bench.workloads._transformer import Block, WindowWorkload
from gradwire.bench.workloads.base import Metric
from gradwire.errors import ConfigError

_INITIAL = 0.02


@dataclass(frozen=True)
class Gpt(WindowWorkload):
    """Predicts each of `context` characters from those before it; 10.8 million parameters.

    Without a data folder it reads the source of the standard library.
    """

    layers: int = 6
    heads: int = 6
    width: int = 384
    dropout: float = 0.1
    learning_rate: float = 0.001
    clip_norm: float = 1.0
    metric: ClassVar = Metric("bits per character", "lower")
    source: ClassVar = SHAKESPEARE
    tiny: ClassVar = "synthetic=true,context=16,layers=1,heads=2,width=16,learning_rate=0.01"

    @property
    def title(self) -> str:
        return f"GPT on {'Tiny Shakespeare' if self.data else 'the characters of Python'}"

    def build(self) -> nn.Module:
        if self.width % self.heads:
            raise ConfigError(f"gpt: width {self.width} must be a multiple of heads {self.heads}")
        return _Gpt(self)

    def optimiser(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.learning_rate, betas=(0.9, 0.99))

    def learning_rate_at(self, progress: float) -> float:
        return self.learning_rate * schedules.cosine(progress, warm=0.05)

    def text(self) -> Text:
        return find_text(self.data, self.device, self.synthetic)

    def metric_of(self, loss: float) -> float:
        return loss / math.log(2)


class _Gpt(nn.Module):
    def __init__(self, sizes: Gpt) -> None:
        nn.Module.__init__(self)
        self.symbols = nn.Embedding(SYMBOLS, sizes.width)
        self.places = nn.Embedding(sizes.context, sizes.width)
        self.drop = nn.Dropout(sizes.dropout)
        self.blocks = nn.Sequential(
            *(Block(sizes.width, sizes.heads, sizes.dropout) for _ in range(sizes.layers))
        )
        self.norm = nn.LayerNorm(sizes.width)
        self.output = nn.Linear(sizes.width, SYMBOLS)
        for embedding in (self.symbols, self.places):
            nn.init.normal_(embedding.weight, std=_INITIAL)

    def forward(self, text: Tensor) -> Tensor:
        x = self.drop(self.symbols(text) + self.places.weight[: text.shape[1]])
        logits: Tensor = self.output(self.norm(self.blocks(x)))
        return logits
