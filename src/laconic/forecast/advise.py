"""`laconic.advise`: asks a running DDP job whether compression would pay there."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

from laconic.comm.base import Comm
from laconic.comm.groups import check_member
from laconic.comm.torch import TorchComm
from laconic.errors import ConfigError
from laconic.forecast.advice import BITS16, FP32, SPECS, Advice, Option, advice, weigh
from laconic.forecast.compute import measure
from laconic.forecast.host import cores_each, mean_of_ranks, workers_here
from laconic.forecast.probe import probe
from laconic.forecast.risk import judge
from laconic.forecast.timeline import Forecast
from laconic.plan import Plan, make_plan


def advise(
    model: DDP,
    loss: Callable[[nn.Module], Tensor],
    *,
    optimiser: Callable[[nn.Module], Optimizer] | None = None,
    specs: Sequence[str] | str = SPECS,
    process_group: dist.ProcessGroup | None = None,
) -> Advice:
    """A ranked table of methods for this model on the links between its ranks; `print` it.

    Called on all ranks, between two steps: it probes their links, and measures a copy of the model
    with `loss(copy)` and the methods on its gradients. `optimiser(copy)` makes the optimiser whose
    step counts; without one it is plain SGD. All ranks return the same.
    """
    if not isinstance(model, DDP):
        raise ConfigError(f"advise: expected a DistributedDataParallel, got {type(model).__name__}")
    _check_callable("loss", loss)
    if optimiser is not None:
        _check_callable("optimiser", optimiser)
    group = model.process_group if process_group is None else process_group
    check_member(group)
    comm = TorchComm(group)
    copy = deepcopy(model.module)
    tensors: dict[str, Tensor] = {n: p for n, p in copy.named_parameters() if p.requires_grad}
    device = next(iter(tensors.values())).device
    # Refused before anything is measured, which takes a while.
    plans = {
        spec: make_plan(spec, None, "auto", tensors.values(), comm.size)
        for spec in dict.fromkeys((FP32, BITS16, *_listed(specs)))
    }
    network = probe(comm, device)
    cores = cores_each(workers_here(comm, device), device)
    made = SGD(copy.parameters(), lr=0.0) if optimiser is None else optimiser(copy)
    compute = measure(copy, lambda net, step: loss(net), lambda: _update(made))
    options = weigh(plans, compute, tensors, comm.size, network, cores)
    agreed = [_agreed(comm, device, option, plans[option.spec]) for option in options]
    count = sum(tensor.numel() for tensor in tensors.values())
    links = network.link.words()
    return advice(
        f"{count / 1e6:.3g} M parameters on {device.type}, {comm.size} workers, links as probed: "
        f"{links} a hop",
        agreed,
    )


def _check_callable(key: str, value: object) -> None:
    if not callable(value):
        raise ConfigError(f"advise: {key} must be a function of the model, got {value!r}")


def _listed(specs: Sequence[str] | str) -> Sequence[str]:
    """Several specs; one alone is one of them, and not its letters."""
    several = [specs] if isinstance(specs, str) else specs
    if not isinstance(several, Sequence) or not all(isinstance(spec, str) for spec in several):
        raise ConfigError(f"advise: specs must be spec strings, got {specs!r}")
    return several


def _update(optimiser: Optimizer) -> None:
    optimiser.step()


def _agreed(comm: Comm, device: torch.device, option: Option, plan: Plan) -> Option:
    """The mean of what all ranks have measured."""
    own = [*option.prediction.forecast, option.risk.relative_error]
    *times_s, error = mean_of_ranks(comm, device, own)
    prediction = replace(option.prediction, forecast=Forecast(*times_s))
    return replace(option, prediction=prediction, risk=judge(plan, error, comm.size))
