"""What a benchmark trains: a model, its data, its loss and its optimiser, alike on all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from inspect import isabstract
from pkgutil import iter_modules
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.bench import workloads
from laconic.errors import ConfigError
from laconic.spec import from_settings, read_settings


class Batch(NamedTuple):
    inputs: Tensor
    targets: Tensor


class Evaluation(NamedTuple):
    """How good a model is on data that it was not trained on."""

    loss: float
    metric_name: str
    metric: float


class Workload(ABC):
    """A training job in small; its settings are its fields."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What the reports call it."""

    @abstractmethod
    def build(self) -> nn.Module:
        """A new model, from torch's global generator."""

    @abstractmethod
    def optimiser(self, model: nn.Module) -> Optimizer: ...

    @abstractmethod
    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        """What one worker learns from in one step, the same in every run."""

    @abstractmethod
    def loss(self, output: Tensor, targets: Tensor) -> Tensor: ...

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Evaluation: ...


@cache
def workload_classes() -> Mapping[str, type[Workload]]:
    """The workloads by file name: the folder is the registry."""
    found: dict[str, type[Workload]] = {}
    for module in iter_modules(workloads.__path__):
        path = f"{workloads.__name__}.{module.name}"
        for member in vars(import_module(path)).values():
            own = isinstance(member, type) and member.__module__ == path
            if own and issubclass(member, Workload) and not isabstract(member):
                assert module.name not in found, f"two workloads in {path}"
                found[module.name] = member
    return found


def parse_workload(text: str) -> Workload:
    """The workload that `text` describes, such as "mlp:batch_size=32"."""
    name, texts = read_settings(text)
    classes = workload_classes()
    if name in classes:
        return from_settings(name, classes[name], texts)
    close = get_close_matches(name, classes, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(classes)}"
    raise ConfigError(f"no workload named {name!r}{hint}")


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
