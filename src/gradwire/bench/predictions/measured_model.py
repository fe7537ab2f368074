"""Workloads and cases as predictions need them: a measured model with its gradients, and plans."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from gradwire.auto.auto import Auto
from gradwire.auto.optimizers import is_adaptive
from gradwire.bench.cases.baselines import DdpFp32, TorchBf16, TorchFp16
from gradwire.bench.cases.local import LocalCase
from gradwire.bench.cases.parse import MethodCase, parse_case
from gradwire.bench.workloads.base import Workload, update
from gradwire.control.base import Controller
from gradwire.engine.make_plan import make_plan
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.perfmodel.compute import Compute, Loss, Update, measure
from gradwire.perfmodel.exchange_cost import ExchangeCost, measure_exchange


@dataclass(frozen=True)
class MeasuredModel:
    """A model whose computation has been measured."""

    title: str
    tensors: Mapping[str, Tensor]
    compute: Compute
    adaptive: bool = False
    """Whether its optimiser rescales every entry of the gradient, as Adam does."""
    _exchange_costs: dict[tuple[Plan, int], ExchangeCost] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def has_exchange_cost(self, plan: Plan, workers: int) -> bool:
        return (plan, workers) in self._exchange_costs

    def exchange_cost(self, plan: Plan, workers: int) -> ExchangeCost:
        """Returns the cost of one rank's exchange, measured once for all networks."""
        key = plan, workers
        if key not in self._exchange_costs:
            self._exchange_costs[key] = measure_exchange(
                plan, self.tensors, self.compute.steps, workers
            )
        return self._exchange_costs[key]

    def with_compute_s(self, compute_s: float) -> "MeasuredModel":
        """Returns the model with all times of its computation scaled to a sum of `compute_s`."""
        own = self.compute
        factor = compute_s / own.compute_s
        scaled = replace(
            own,
            forward_s=own.forward_s * factor,
            ready_s=tuple(ready_s * factor for ready_s in own.ready_s),
            tail_s=own.tail_s * factor,
            samples_s=tuple(tuple(s * factor for s in sample) for sample in own.samples_s),
        )
        return replace(self, compute=scaled)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())

    def to(self, device: str) -> "MeasuredModel":
        """Returns a copy on another device; the measured times stay those of the first."""
        tensors = {name: tensor.detach().to(device) for name, tensor in self.tensors.items()}
        steps = tuple(tuple(b.to(device) for b in step) for step in self.compute.steps)
        return replace(self, tensors=tensors, compute=replace(self.compute, steps=steps))


def measure_workload(
    workload: Workload, rank: int = 0, workers: int = 1, seed: int = 0, steps: int = 3
) -> MeasuredModel:
    """Measures the workload's model in some steps of one worker."""
    torch.manual_seed(seed)
    model = workload.build().to(workload.device)
    optimiser = workload.optimiser(model)

    def loss(net: nn.Module, step: int) -> Tensor:
        inputs, targets = workload.batch(step, rank, workers, seed)
        return workload.loss(net(inputs), targets)

    def step() -> None:
        update(workload, model, optimiser, 0, 1)

    return measure_model(workload.title, model, loss, step, is_adaptive(optimiser), steps)


def measure_model(
    title: str, model: nn.Module, loss: Loss, step: Update, adaptive: bool, steps: int = 3
) -> MeasuredModel:
    compute = measure(model, loss, step, steps)
    tensors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return MeasuredModel(title, tensors, compute, adaptive)


def controller_of(text: str) -> Controller | None:
    """Returns the controller of a case, or None."""
    case = parse_case(text)
    return case.make_controller() if isinstance(case, MethodCase) else None


def auto_of(text: str) -> Auto | None:
    """Returns the automatic mode of a case, or None."""
    case = parse_case(text)
    return case.auto() if isinstance(case, MethodCase) else None


def plan_of(
    text: str, tensors: Mapping[str, Tensor], size: int, *, controlled: bool = False
) -> Plan:
    """Returns the plan of a case; dense baselines get the plan of our equal dense methods.

    Of a `controlled` case it is the plan at the first step.
    """
    case = parse_case(text)
    automatic = auto_of(text) is not None
    if not controlled and (automatic or controller_of(text) is not None):
        raise ConfigError(f"{text}: a controller decides during training; give --steps")
    if isinstance(case, DdpFp32):
        return make_plan("none", None, "auto", tensors.values(), size)
    if isinstance(case, TorchFp16):
        return make_plan("fp16", None, "auto", tensors.values(), size)
    if isinstance(case, TorchBf16):
        return make_plan("bf16", None, "auto", tensors.values(), size)
    if isinstance(case, LocalCase):
        raise ConfigError(f"{text}: not all of its steps are alike; see bench step or bench train")
    if not isinstance(case, MethodCase):
        raise ConfigError(f"{text}: torch's own hooks cannot be simulated; try powersgd")
    memory = None if case.memory == "auto" else case.memory
    return make_plan(
        "none" if automatic else case.spec, memory, case.exchange, tensors.values(), size
    )
