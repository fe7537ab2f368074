"""A GPT (Radford et al. 2019) on characters: Tiny Shakespeare, or Python's own library."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim import AdamW, Optimizer

from gradwire.bench.datasets.sampling import random_integers
from gradwire.bench.datasets.text import SHAKESPEARE, SYMBOLS, Text, find_text
from gradwire.bench.workloads import _schedules as schedules
from gradwire.bench.workloads.base import Batch, Evaluation, Metric, Workload, evaluating
from gradwire.errors import ConfigError

_INITIAL = 0.02
_EVALUATED = 128
_EVAL_BATCH = 16


@dataclass(frozen=True)
class Gpt(Workload):
    """Predicts each of `context` characters from those before it; 10.8 million parameters.

    Without a data folder it reads the source of the standard library.
    """

    batch_size: int = 16
    context: int = 256
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

    def examples(self) -> int:
        return len(self._text().training) // self.context

    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        """Returns windows from random positions of the text."""
        text = self._text().training
        key = seed, step, rank
        starts = random_integers(len(text) - self.context, self.batch_size, self.device, *key)
        return self._windows(text, starts)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Evaluates on windows spread evenly over the held-out text."""
        text = self._text().held_out
        last = len(text) - self.context - 1
        starts = torch.linspace(0, last, _EVALUATED, dtype=torch.float64, device=self.device).long()
        inputs, targets = self._windows(text, starts)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with evaluating(model):
            for text_part, next_part in zip(
                inputs.split(_EVAL_BATCH), targets.split(_EVAL_BATCH), strict=True
            ):
                loss = loss + self.loss(model(text_part), next_part) * len(text_part)
        mean = float(loss) / len(inputs)
        return Evaluation(mean, self.metric.name, mean / math.log(2))

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts[:, None] + torch.arange(self.context + 1, device=self.device)]
        return Batch(windows[:, :-1], windows[:, 1:])

    def _text(self) -> Text:
        return find_text(self.data, self.device, self.synthetic)


class _Gpt(nn.Module):
    def __init__(self, sizes: Gpt) -> None:
        nn.Module.__init__(self)
        self.symbols = nn.Embedding(SYMBOLS, sizes.width)
        self.places = nn.Embedding(sizes.context, sizes.width)
        self.drop = nn.Dropout(sizes.dropout)
        self.blocks = nn.Sequential(*(_Block(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.output = nn.Linear(sizes.width, SYMBOLS)
        for embedding in (self.symbols, self.places):
            nn.init.normal_(embedding.weight, std=_INITIAL)

    def forward(self, text: Tensor) -> Tensor:
        x = self.drop(self.symbols(text) + self.places.weight[: text.shape[1]])
        logits: Tensor = self.output(self.norm(self.blocks(x)))
        return logits


class _Block(nn.Module):
    """A pre-norm transformer block: causal attention and a perceptron, each with a residual."""

    def __init__(self, sizes: Gpt) -> None:
        nn.Module.__init__(self)
        width, self.heads = sizes.width, sizes.heads
        self.before_attention, self.before_thought = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self._attend(self.before_attention(x)))
        hidden = self.narrow(gelu(self.wide(self.before_thought(x))))
        output: Tensor = x + self.drop(hidden)
        return output

    def _attend(self, x: Tensor) -> Tensor:
        # [windows, 3 heads, positions, width of a head]
        split = self.query_key_value(x).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = split.chunk(3, dim=1)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.attended(mixed.transpose(1, 2).flatten(2))
        return attended
