"""Shared parts of the transformer language models: blocks, windows of text, and evaluation."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from gradwire.bench.datasets.sampling import random_integers
from gradwire.bench.datasets.text import Text
from gradwire.bench.workloads.base import Batch, Evaluation, Workload, evaluating
from gradwire.errors import ConfigError

_EVALUATED = 128
_EVAL_BATCH = 16


@dataclass(frozen=True)
class WindowWorkload(Workload):
    """Predicts each of `context` tokens from those before it, in windows of a text."""

    batch_size: int = 16
    context: int = 256

    @abstractmethod
    def text(self) -> Text: ...

    @abstractmethod
    def metric_of(self, loss: float) -> float:
        """Returns the metric of a mean loss in nats per token."""

    def examples(self) -> int:
        return len(self.text().training) // self.context

    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        """Returns windows from random positions of the text."""
        text = self.text().training
        last = self._last_start(text)
        key = seed, step, rank
        return self._windows(text, random_integers(last + 1, self.batch_size, self.device, *key))

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Evaluates on windows spread evenly over the held-out text."""
        text = self.text().held_out
        last = self._last_start(text)
        starts = torch.linspace(0, last, _EVALUATED, dtype=torch.float64, device=self.device).long()
        inputs, targets = self._windows(text, starts)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with evaluating(model):
            for text_part, next_part in zip(
                inputs.split(_EVAL_BATCH), targets.split(_EVAL_BATCH), strict=True
            ):
                loss = loss + self.loss(model(text_part), next_part) * len(text_part)
        mean = float(loss) / len(inputs)
        return Evaluation(mean, self.metric.name, self.metric_of(mean))

    def _last_start(self, text: Tensor) -> int:
        """Returns the last position at which a window and its next token fit into the text."""
        last = len(text) - self.context - 1
        if last < 0:
            raise ConfigError(
                f"{self.name}: context must be below {len(text)}, the number of tokens of a text, "
                f"got {self.context}"
            )
        return last

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts[:, None] + torch.arange(self.context + 1, device=self.device)].long()
        return Batch(windows[:, :-1], windows[:, 1:])


class Block(nn.Module):
    """A pre-norm transformer block: causal attention and a perceptron, each with a residual."""

    def __init__(
        self, width: int, heads: int, dropout: float, gelu_form: Literal["none", "tanh"] = "none"
    ) -> None:
        nn.Module.__init__(self)
        self.heads, self.gelu_form = heads, gelu_form
        self.before_attention, self.before_thought = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self._attend(self.before_attention(x)))
        hidden = gelu(self.wide(self.before_thought(x)), approximate=self.gelu_form)
        output: Tensor = x + self.drop(self.narrow(hidden))
        return output

    def _attend(self, x: Tensor) -> Tensor:
        # [windows, 3 heads, positions, width of a head]
        split = self.query_key_value(x).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = split.chunk(3, dim=1)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.attended(mixed.transpose(1, 2).flatten(2))
        return attended
