"""A character language model of Python's own standard library: real text, and nothing to download.

The architecture is Bengio et al. 2003: the embeddings of the last characters, two hidden layers.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, Optimizer

from gradwire.bench.datasets.text import SHAKESPEARE, SYMBOLS, Text, find_text
from gradwire.bench.workloads.base import Batch, Evaluation, Metric, Workload, evaluating

_EVALUATED = 2048


@dataclass(frozen=True)
class CharLm(Workload):
    """Predicts a character from the `context` before it; 1.1 million parameters by default.

    With a data folder it reads Tiny Shakespeare instead.
    """

    batch_size: int = 64
    context: int = 16
    width: int = 32
    hidden: int = 1024
    learning_rate: float = 0.002
    metric: ClassVar = Metric("accuracy", "higher")
    source: ClassVar = SHAKESPEARE
    tiny: ClassVar = "synthetic=true,hidden=64,batch_size=8"

    @property
    def title(self) -> str:
        text = "Tiny Shakespeare" if self.data else "Python's library"
        return f"character model of {text}"

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(SYMBOLS, self.width),
            nn.Flatten(),
            nn.Linear(self.context * self.width, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.hidden // 2),
            nn.ReLU(),
            nn.Linear(self.hidden // 2, SYMBOLS),
        )

    def optimiser(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=self.learning_rate)

    def learning_rate_at(self, progress: float) -> float:
        return self.learning_rate

    def examples(self) -> int:
        return len(self._text().training) - self.context

    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        text = self._text().training
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * workers + rank)
        starts = torch.randint(len(text) - self.context, (self.batch_size,), generator=generator)
        return self._windows(text, starts.to(self.device))

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(output, targets)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Evaluates on characters spread evenly over the held-out text."""
        text = self._text().held_out
        starts = torch.linspace(0, len(text) - self.context - 1, _EVALUATED).long()
        inputs, targets = self._windows(text, starts.to(self.device))
        with evaluating(model):
            output = model(inputs)
        right = (output.argmax(1) == targets).float().mean()
        return Evaluation(float(self.loss(output, targets)), self.metric.name, float(right))

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        place = torch.arange(self.context + 1, device=self.device)
        windows = text[starts[:, None] + place]  # [examples, context + 1]
        return Batch(windows[:, :-1], windows[:, -1])

    def _text(self) -> Text:
        return find_text(self.data, self.device, self.synthetic)
