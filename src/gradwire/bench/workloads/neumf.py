"""NeuMF on MovieLens-1M: neural collaborative filtering (He et al. 2017)."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam, Optimizer

from gradwire.bench.datasets.movielens import (
    MOVIELENS,
    OFFICIAL,
    SYNTHETIC,
    Ratings,
    Sizes,
    read_movielens,
    synthetic_movielens,
)
from gradwire.bench.datasets.sampling import batch_slice, random_integers, random_permutation
from gradwire.bench.workloads.base import Batch, Evaluation, Metric, Workload, evaluating

_TOP = 10
_EVAL_USERS = 500
_INITIAL = 0.01


class Epoch(NamedTuple):
    """Rated items and items that the users did not rate, in random order."""

    pairs: Tensor  # [examples, user and item]
    rated: Tensor


@dataclass(frozen=True)
class NeuMf(Workload):
    """Predicts who rated what, with `negatives` unrated items per rating; 2.0 million parameters.

    A batch has `batch_size` pairs. The unrated items are sampled anew in every epoch.
    """

    batch_size: int = 1024
    factors: int = 64
    negatives: int = 4
    learning_rate: float = 0.001
    metric: ClassVar = Metric("hit rate at 10", "higher")
    source: ClassVar = MOVIELENS
    tiny: ClassVar = "synthetic=true,factors=4,batch_size=64,learning_rate=0.01"

    @property
    def title(self) -> str:
        return "NeuMF on MovieLens-1M"

    def build(self) -> nn.Module:
        return _NeuMf(SYNTHETIC if self.synthetic else OFFICIAL, self.factors)

    def optimiser(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=self.learning_rate)

    def learning_rate_at(self, progress: float) -> float:
        return self.learning_rate

    def examples(self) -> int:
        return len(self.ratings().users) * (1 + self.negatives)

    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        epoch, start, stop = batch_slice(self.examples(), self.batch_size, step, rank, workers)
        pairs, rated = _epoch(self, seed, epoch)
        return Batch(pairs[start:stop], rated[start:stop].float())

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(output, targets)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Evaluates the share of users whose held-out item is among the best 10 of 100."""
        candidates = self.ratings().candidates  # [users, 100], the held-out item first
        users = torch.arange(len(candidates), device=self.device)[:, None].expand_as(candidates)
        with evaluating(model):
            pairs = torch.stack([users, candidates], 2).split(_EVAL_USERS)
            scores = torch.cat([model(some.flatten(0, 1)).view(some.shape[:2]) for some in pairs])
        targets = torch.zeros_like(scores)
        targets[:, 0] = 1
        # An item with an equal score is not ranked higher, nor is one with NaN.
        hits = (scores[:, :1] > scores[:, 1:]).sum(1) > scores.shape[1] - 1 - _TOP
        loss = float(self.loss(scores, targets))
        return Evaluation(loss, self.metric.name, float(hits.float().mean()))

    def ratings(self) -> Ratings:
        if self.synthetic:
            return synthetic_movielens(self.device)
        return read_movielens(self.data, self.device)


class _NeuMf(nn.Module):
    """Joins a product of factors and a perceptron on other factors by one layer."""

    def __init__(self, sizes: Sizes, factors: int) -> None:
        nn.Module.__init__(self)
        self.users, self.items = (nn.Embedding(count, 3 * factors) for count in sizes[:2])
        widths = [4 * factors, 4 * factors, 2 * factors, factors]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.perceptron = nn.Sequential(*layers)
        self.output = nn.Linear(2 * factors, 1)
        self.factors = factors
        for embedding in (self.users, self.items):
            nn.init.normal_(embedding.weight, std=_INITIAL)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        product = user[:, : self.factors] * item[:, : self.factors]
        both = torch.cat([user[:, self.factors :], item[:, self.factors :]], 1)
        logits: Tensor = self.output(torch.cat([product, self.perceptron(both)], 1))
        return logits[:, 0]


@lru_cache(maxsize=2)
def _epoch(workload: NeuMf, seed: int, epoch: int) -> Epoch:
    users, items, rated, _ = workload.ratings()
    negative_users = users.repeat(workload.negatives)
    negatives = _unrated(rated, negative_users, seed, epoch)
    order = random_permutation(len(users) + len(negative_users), workload.device, seed, epoch, 0)
    pairs = torch.stack([torch.cat([users, negative_users]), torch.cat([items, negatives])], 1)
    return Epoch(pairs[order], order < len(users))


def _unrated(rated: Tensor, users: Tensor, seed: int, epoch: int) -> Tensor:
    """Samples for each of `users` an item that it has not rated; repeats rejected samples."""
    items, device = rated.shape[1], str(users.device)
    drawn = random_integers(items, len(users), device, seed, epoch, 1)
    again, tries = rated[users, drawn].nonzero()[:, 0], 1
    while len(again):
        tries += 1
        drawn[again] = random_integers(items, len(again), device, seed, epoch, tries)
        again = again[rated[users[again], drawn[again]]]
    return drawn
