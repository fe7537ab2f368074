"""Shared parts of the word language models: a two-layer LSTM, windows of text, and perplexity.

Every window starts with a zero state, so a worker keeps no state between steps. An evaluation
carries the state through the whole text, as usual (Zaremba et al. 2014).
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from gradwire.bench.datasets.sampling import batch_slice, random_integers, random_permutation
from gradwire.bench.datasets.text import Words
from gradwire.bench.workloads import _schedules as schedules
from gradwire.bench.workloads.base import Batch, Evaluation, Metric, Workload, evaluating

_STREAMS = 10
_EVAL_BATCH = 35

State = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """Maps words to the logits of the next words, [windows, words, vocabulary]."""

    def __init__(self, vocabulary: int, hidden: int, dropout: float) -> None:
        nn.Module.__init__(self)
        self.drop = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, dropout=dropout, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)
        # 0.04 at 1500, as in the paper; with smaller weights a narrow model ignores its inputs.
        largest = 1.5 / hidden**0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -largest, largest)

    def forward(self, words: Tensor) -> Tensor:
        return self.forward_from(words, None)[0]

    def forward_from(self, words: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Continues from the LSTM state after earlier words."""
        hidden, state = self.lstm(self.drop(self.embedding(words)), state)
        logits: Tensor = self.output(self.drop(hidden))
        assert state is not None
        return logits, state


@dataclass(frozen=True)
class LstmWorkload(Workload):
    """Predicts the next word in windows of `words`; gradients are clipped."""

    batch_size: int = 20
    words: int = 35
    hidden: int = 650
    dropout: float = 0.5
    learning_rate: float = 20.0
    vocabulary: int = 10_000
    clip_norm: float = 0.25
    metric: ClassVar = Metric("perplexity", "lower")

    @abstractmethod
    def text(self) -> Words: ...

    def build(self) -> nn.Module:
        return LanguageModel(self.vocabulary, self.hidden, self.dropout)

    def optimiser(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.learning_rate)

    def learning_rate_at(self, progress: float) -> float:
        return self.learning_rate * schedules.plateau(progress, end=0.4)

    def examples(self) -> int:
        # The last word has no successor, and the shift needs one window.
        return (len(self.text().training) - 1) // self.words - 1

    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        """Returns adjacent windows, whose start is shifted in every epoch."""
        text = self.text().training
        count = self.examples()
        epoch, start, stop = batch_slice(count, self.batch_size, step, rank, workers)
        starts = _window_starts(count, self.words, seed, epoch, self.device)[start:stop]
        place = torch.arange(self.words + 1, device=self.device)
        windows = text[starts[:, None] + place]  # [windows, words + 1]
        return Batch(windows[:, :-1], windows[:, 1:])

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Evaluates on the test text, as ten streams in parallel."""
        assert isinstance(model, LanguageModel)
        text = self.text().held_out
        length = (len(text) - 1) // _STREAMS
        inputs, targets = (part[: _STREAMS * length].view(_STREAMS, -1) for part in _shift(text))
        loss, state = torch.zeros((), dtype=torch.float64, device=self.device), None
        with evaluating(model):
            for words, next_words in zip(
                inputs.split(_EVAL_BATCH, 1), targets.split(_EVAL_BATCH, 1), strict=True
            ):
                logits, state = model.forward_from(words, state)
                loss = loss + self.loss(logits, next_words) * next_words.numel()
        mean = float(loss) / targets.numel()
        # exp(700) is near the largest float.
        return Evaluation(mean, self.metric.name, math.exp(mean) if mean < 700 else math.inf)


def _shift(text: Tensor) -> tuple[Tensor, Tensor]:
    return text[:-1], text[1:]


@lru_cache(maxsize=2)
def _window_starts(count: int, words: int, seed: int, epoch: int, device: str) -> Tensor:
    shift = random_integers(words, 1, device, seed, epoch, 1)
    return shift + words * random_permutation(count, device, seed, epoch, 0)
