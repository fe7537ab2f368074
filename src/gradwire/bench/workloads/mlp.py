"""A multilayer perceptron on fixed random inputs: many gradient bytes for little compute."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from gradwire.bench.workloads.base import Batch, Evaluation, Metric, Workload, evaluating

_EVALUATED = 256
_LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Mlp(Workload):
    """784-2048-2048-10, the sizes of handwritten digits; 5.8 million parameters by default."""

    batch_size: int = 32
    inputs: int = 784
    hidden: int = 2048
    classes: int = 10
    metric: ClassVar = Metric("accuracy", "higher")
    tiny: ClassVar = "hidden=64,batch_size=8"

    @property
    def title(self) -> str:
        return f"MLP {self.inputs}-{self.hidden}-{self.hidden}-{self.classes}"

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.inputs, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.classes),
        )

    def optimiser(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=_LEARNING_RATE)

    def learning_rate_at(self, progress: float) -> float:
        return _LEARNING_RATE

    def examples(self) -> int:
        return self.batch_size

    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        """Returns fixed examples: equal in every step, different on every rank."""
        return self._examples(self.batch_size, seed * workers + rank)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(output, targets)

    def evaluate(self, model: nn.Module) -> Evaluation:
        # A seed that no rank uses.
        inputs, targets = self._examples(_EVALUATED, seed=2**31)
        with evaluating(model):
            output = model(inputs)
        right = (output.argmax(1) == targets).float().mean()
        return Evaluation(float(self.loss(output, targets)), self.metric.name, float(right))

    def _examples(self, count: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, self.inputs, generator=generator)
        targets = torch.randint(self.classes, (count,), generator=generator)
        return Batch(inputs.to(self.device), targets.to(self.device))
