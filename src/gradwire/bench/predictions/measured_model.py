"""Workloads and cases as predictions need them: a measured model with its gradients, and plans."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from gradwire.bench.cases.baselines import DdpFp32, TorchBf16, TorchFp16
from gradwire.bench.cases.local import LocalCase
from gradwire.bench.cases.parse import Gradwire, parse_case
from gradwire.bench.workloads.base import Workload, update
from gradwire.control.base import Controller
from gradwire.engine.plan import Plan, make_plan
from gradwire.errors import ConfigError
from gradwire.perfmodel.compute import Compute, Loss, Update, measure
from gradwire.perfmodel.exchange_cost import Rehearsed, rehearse


@dataclass(frozen=True)
class Subject:
    """A model whose computation has been measured."""

    title: str
    tensors: Mapping[str, Tensor]
    compute: Compute
    _rehearsed: dict[tuple[Plan, int], Rehearsed] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def has_rehearsed(self, plan: Plan, workers: int) -> bool:
        return (plan, workers) in self._rehearsed

    def rehearsed(self, plan: Plan, workers: int) -> Rehearsed:
        """One rank's exchange; rehearsed once, since it is the same on every network."""
        key = plan, workers
        if key not in self._rehearsed:
            self._rehearsed[key] = rehearse(plan, self.tensors, self.compute.steps, workers)
        return self._rehearsed[key]

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())

    def to(self, device: str) -> "Subject":
        """The same on another device: what was measured is still what it was on the first."""
        tensors = {name: tensor.detach().to(device) for name, tensor in self.tensors.items()}
        steps = tuple(tuple(b.to(device) for b in step) for step in self.compute.steps)
        return replace(self, tensors=tensors, compute=replace(self.compute, steps=steps))


def measure_workload(workload: Workload, rank: int = 0, workers: int = 1, seed: int = 0) -> Subject:
    """The workload's model after some steps of one worker."""
    torch.manual_seed(seed)
    model = workload.build().to(workload.device)
    optimiser = workload.optimiser(model)

    def loss(net: nn.Module, step: int) -> Tensor:
        inputs, targets = workload.batch(step, rank, workers, seed)
        return workload.loss(net(inputs), targets)

    def step() -> None:
        update(workload, model, optimiser, 0, 1)

    return measure_model(workload.title, model, loss, step)


def measure_model(title: str, model: nn.Module, loss: Loss, step: Update) -> Subject:
    compute = measure(model, loss, step)
    return Subject(title, {n: p for n, p in model.named_parameters() if p.requires_grad}, compute)


def controller_of(text: str) -> Controller | None:
    """Who changes a case's settings on the way."""
    case = parse_case(text)
    return case.rule() if isinstance(case, Gradwire) else None


def plan_of(text: str, tensors: Mapping[str, Tensor], size: int, *, steered: bool = False) -> Plan:
    """What a case sends; the dense baselines send what our own dense methods do.

    Where it is `steered`, that is what it sends at first.
    """
    case = parse_case(text)
    if not steered and controller_of(text) is not None:
        raise ConfigError(f"{text}: what a controller decides shows in training; say --steps")
    if isinstance(case, DdpFp32):
        return make_plan("none", None, "auto", tensors.values(), size)
    if isinstance(case, TorchFp16):
        return make_plan("fp16", None, "auto", tensors.values(), size)
    if isinstance(case, TorchBf16):
        return make_plan("bf16", None, "auto", tensors.values(), size)
    if isinstance(case, LocalCase):
        raise ConfigError(f"{text}: not all of its steps are alike; see bench step or bench train")
    if not isinstance(case, Gradwire):
        raise ConfigError(f"{text}: torch's own hooks cannot be simulated; try powersgd")
    memory = None if case.memory == "auto" else case.memory
    return make_plan(case.spec, memory, case.exchange, tensors.values(), size)
