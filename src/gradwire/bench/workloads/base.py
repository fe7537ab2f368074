"""The workload interface, and the registry that finds a workload by its file name.

A workload is a model with its data, loss and optimiser, equal on all ranks. It knows nothing of
processes: (step, rank, workers, seed) gives a batch, a model's output gives a loss, a model gives a
metric. Real and simulated workers use the same interface. `Epochs` reports the learning rate to
controllers at the end of an epoch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from pkgutil import iter_modules
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from gradwire.bench import workloads
from gradwire.bench.datasets.source import Source
from gradwire.checks import check_fraction_below_one, check_number, check_whole
from gradwire.errors import ConfigError
from gradwire.spec import from_settings, read_settings

_TINY = "-tiny"


class Batch(NamedTuple):
    inputs: Tensor
    targets: Tensor


class Metric(NamedTuple):
    name: str
    better: Literal["higher", "lower"]


class Evaluation(NamedTuple):
    """Loss and metric of a model on held-out data."""

    loss: float
    metric_name: str
    metric: float


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """A training job; its settings are its fields.

    Data is read from the folder `data` at the first batch, and is kept on `device`. `synthetic`
    data needs no folder: it is small and learnable, but does not predict results on real data.
    """

    batch_size: int
    data: Path | None = None
    device: str = "cpu"
    synthetic: bool = False

    metric: ClassVar[Metric]
    tiny: ClassVar[str]
    """The settings of NAME-tiny, which takes a step in milliseconds."""
    source: ClassVar[Source | None] = None

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, field.type)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"{self.name}: clip_norm must be positive, got {self.clip_norm}")
        if self.source is None and (self.data is not None or self.synthetic):
            raise ConfigError(f"{self.name}: generates its data, so it takes no data folder")
        if self.data is not None and self.synthetic:
            raise ConfigError(f"{self.name}: synthetic data and the folder {self.data}: choose one")

    def _check(self, key: str, kind: object) -> None:
        """Checks one setting: whole numbers are at least 1, a dropout is below 1."""
        value = getattr(self, key)
        if kind is int:
            check_whole(self.name, key, value, 1)
        elif key == "dropout":
            check_fraction_below_one(self.name, key, value)
        elif kind is float:
            check_number(self.name, key, value)
            if value < 0:
                raise ConfigError(f"{self.name}: {key} must not be negative, got {value}")

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    @property
    @abstractmethod
    def title(self) -> str:
        """The name of the workload in reports."""

    @property
    def clip_norm(self) -> float | None:
        """The limit of the gradient's norm in a step, of the mean or of a worker's own gradient."""
        return None

    @property
    def heading(self) -> str:
        """The title, marked if the data is synthetic."""
        return f"{self.title} (synthetic)" if self.synthetic else self.title

    @abstractmethod
    def build(self) -> nn.Module:
        """Builds a new model on the CPU, from torch's global generator; needs no data."""

    @abstractmethod
    def optimiser(self, model: nn.Module) -> Optimizer: ...

    @abstractmethod
    def learning_rate_at(self, progress: float) -> float:
        """Returns the learning rate when the fraction `progress` of all steps is done."""

    @abstractmethod
    def examples(self) -> int:
        """Returns the number of examples in an epoch; reads the data."""

    @abstractmethod
    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        """Returns one worker's batch of one step, equal in every run and on every device."""

    def batches(self, step: int, workers: int, seed: int) -> Batch:
        """Returns the batches of all workers in one step, concatenated."""
        each = [self.batch(step, rank, workers, seed) for rank in range(workers)]
        inputs, targets = zip(*each, strict=True)
        return Batch(torch.cat(inputs), torch.cat(targets))

    @abstractmethod
    def loss(self, output: Tensor, targets: Tensor) -> Tensor: ...

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Evaluation:
        """Evaluates on held-out data; restores the mode of the model."""


def update(
    workload: Workload,
    model: nn.Module,
    optimiser: Optimizer,
    step: int,
    steps: int,
    *,
    clips: bool = True,
) -> None:
    """Takes step number `step` of `steps`, with the mean gradient that the model holds."""
    if workload.clip_norm is not None and clips:
        clip_grad_norm_(model.parameters(), workload.clip_norm)
    # Evaluated at the middle of a step, where no schedule is 0.
    rate = workload.learning_rate_at((step + 0.5) / steps)
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.step()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches to evaluation mode without gradients, and back at the end."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@cache
def workload_classes() -> Mapping[str, type[Workload]]:
    """Returns the workloads by file name: the folder is the registry."""
    found: dict[str, type[Workload]] = {}
    for module in iter_modules(workloads.__path__):
        path = f"{workloads.__name__}.{module.name}"
        for member in vars(import_module(path)).values():
            own = isinstance(member, type) and member.__module__ == path
            if own and issubclass(member, Workload) and not isabstract(member):
                assert module.name not in found, f"two workloads in {path}"
                found[module.name] = member
    return found


def parse_workload(text: str, data: Path | None = None, device: str = "cpu") -> Workload:
    """Parses a workload, such as "mlp:batch_size=32" or "resnet9-tiny"."""
    full_name, texts = read_settings(text)
    name = full_name.removesuffix(_TINY)
    classes = workload_classes()
    if name in classes:
        tiny = read_settings(f"{name}:{classes[name].tiny}")[1] if full_name != name else {}
        return from_settings(name, classes[name], {**tiny, **texts}, data=data, device=device)
    close = get_close_matches(name, classes, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(classes)}"
    raise ConfigError(f"no workload named {name!r}{hint}")


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class Epochs:
    """Reports the ends of epochs in a run of `steps` steps, with the learning rate.

    Controllers detect decays of the rate. A rate that declines a little at every step has none, so
    a new rate is reported only once it has halved, or has risen.
    """

    def __init__(self, workload: Workload, workers: int, steps: int) -> None:
        self._workload, self._steps = workload, steps
        self._length = max(1, workload.examples() // (workload.batch_size * workers))
        self._reported = self._rate(0)

    def ended(self, step: int) -> float | None:
        """Returns the learning rate of the next epoch if an epoch ends at `step`, else None."""
        if step % self._length:
            return None
        rate = self._rate(step)
        if rate > self._reported or rate <= self._reported / 2:
            self._reported = rate
        return self._reported

    def _rate(self, step: int) -> float:
        return self._workload.learning_rate_at(min(1.0, (step + 0.5) / self._steps))
