"""Simulation: N workers in lock step in this process, with exact byte counts and no network."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.attacks import Attack, Attackers
from gradwire.auto.assembly import automatic
from gradwire.auto.auto import Auto, check_alone, check_ranks, find_auto
from gradwire.auto.optimizers import is_adaptive
from gradwire.base import Memory, UpdateRule
from gradwire.checkpoint.state import load, own_part, save
from gradwire.checks import check_number, check_whole
from gradwire.comm.cost_model import LinkModel
from gradwire.comm.simulated import Simulated
from gradwire.control.base import Controller, find_controller
from gradwire.control.runtime import ControllerRuntime
from gradwire.control.timing import ModelClock
from gradwire.engine.engine import Engine, NanPolicy
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.policies import MethodSpec


class Simulation:
    """Workers that exchange the gradients passed to `step`, as real ranks would."""

    def __init__(self, workers: Sequence[Engine], attackers: Attackers | None = None) -> None:
        self.workers = workers
        self.attackers = attackers
        self.network = Simulated(len(workers))
        self._buffers: dict[tuple[int | str, ...], list[Tensor]] = {}

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Exchanges one gradient by name from each worker; returns the mean that all receive."""
        if not isinstance(gradients, Sequence):
            kind = type(gradients).__name__
            raise ConfigError(f"step: expected a list with gradients of each worker, got {kind}")
        if len(gradients) != len(self.workers):
            raise ConfigError(f"{len(gradients)} gradients for {len(self.workers)} workers")
        names = list(_mapping(0, gradients[0]))
        for rank, worker in enumerate(self.workers):
            _check_gradients(rank, _mapping(rank, gradients[rank]), names, worker.tensors)
        means = [self._copies(rank, own) for rank, own in enumerate(gradients)]
        if self.attackers is not None:
            self.attackers.forge(names, means)
        programs = [w.bucket_program(names, m) for w, m in zip(self.workers, means, strict=True)]
        self.network.run(programs)
        for worker in self.workers:
            worker.end_step()
        errors = [worker.commit_step(wait=False) for worker in self.workers]
        if errors[0] is not None:
            raise errors[0]
        # On a GPU the next step overwrites the copies.
        result = [mean.clone() for mean in means[0]] if self._buffers else means[0]
        return dict(zip(names, result, strict=True))

    def _copies(self, rank: int, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns copies that a worker may overwrite; on a GPU at the same address every step."""
        grads = [grad.detach() for grad in gradients.values()]
        if not grads or not grads[0].is_cuda:
            return [grad.clone() for grad in grads]
        empty = [torch.empty_like(grad) for grad in grads]
        buffers = self._buffers.setdefault((rank, *gradients), empty)
        torch._foreach_copy_(buffers, grads)
        return buffers

    def switch(
        self,
        compressor: MethodSpec,
        *,
        memory: Memory | str | None = None,
        exchange: str = "auto",
    ) -> None:
        """Changes the method of all workers between two steps; residuals are kept."""
        tensors = self.workers[0].tensors
        plan = make_plan(compressor, memory, exchange, tensors, len(self.workers))
        plan = replace(plan, rules=self.workers[0].plan.rules)
        plan = plan.in_chunks(self.workers[0].tensors, self.workers[0].plan.chunk_bytes)
        for worker in self.workers:
            worker.switch(plan)

    def epoch_ended(self, learning_rate: float | None = None) -> None:
        """Informs the controllers, with the learning rate of the next epoch."""
        for worker in self.workers:
            worker.epoch_ended(learning_rate)

    def stats(self) -> dict[str, object]:
        """Returns the statistics of worker 0."""
        return self.workers[0].stats(self.network.meters[0])

    def state_dict(self) -> dict[str, object]:
        states: dict[str, object] = {str(r): save(worker) for r, worker in enumerate(self.workers)}
        if self.attackers is not None:
            states["attackers"] = self.attackers.state_dict()
        return states

    def load_state_dict(self, state: Mapping[str, Mapping[str, object]]) -> None:
        for rank, worker in enumerate(self.workers):
            load(worker, own_part(state, str(rank)))
        if self.attackers is not None:
            own = own_part(state, "attackers")
            self.attackers.load_state_dict({k: v for k, v in own.items() if isinstance(v, Tensor)})


def _mapping(rank: int, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns a worker's gradients; raises ConfigError unless they are a mapping."""
    if not isinstance(gradients, Mapping):
        kind = type(gradients).__name__
        raise ConfigError(f"worker {rank}: expected gradients by name, got {kind}")
    return gradients


def _check_gradients(
    rank: int, gradients: Mapping[str, Tensor], names: list[str], tensors: Mapping[str, Tensor]
) -> None:
    """Raises ConfigError unless a worker has the gradients of worker 0, in the right shapes."""
    if list(gradients) != names or not tensors.keys() >= gradients.keys():
        raise ConfigError(f"worker {rank} has {list(gradients)}, expected {names} of {[*tensors]}")
    for name, gradient in gradients.items():
        shape = tensors[name].shape
        if not isinstance(gradient, Tensor):
            kind = type(gradient).__name__
            raise ConfigError(f"worker {rank}: gradient {name} must be a tensor, got {kind}")
        if gradient.shape != shape:
            has = tuple(gradient.shape)
            raise ConfigError(f"worker {rank}: gradient {name} is {has}, expected {tuple(shape)}")


def _named(parameters: torch.nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the trainable parameters by name."""
    named: dict[str, Tensor]
    if isinstance(parameters, torch.nn.Module):
        named = {n: p for n, p in parameters.named_parameters() if p.requires_grad}
    elif isinstance(parameters, Mapping):
        named = dict(parameters)
    else:
        kind = type(parameters).__name__
        raise ConfigError(f"simulate: expected a module or tensors by name, got {kind}")
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"simulate: parameter {name!r} must be a tensor, got {tensor!r}")
    if not named:
        raise ConfigError("simulate: there is no parameter to train")
    return named


def _rules(
    update: UpdateRule | Mapping[str, UpdateRule] | None, named: Mapping[str, Tensor]
) -> tuple[tuple[str, UpdateRule], ...]:
    """Returns the update rule of every parameter; none if gradients are exchanged."""
    if update is None:
        return ()
    rules = update if isinstance(update, Mapping) else dict.fromkeys(named, update)
    if rules.keys() != named.keys() or not all(isinstance(r, UpdateRule) for r in rules.values()):
        raise ConfigError(
            f"simulate: update must be an update rule, or one for each of {[*named]}, got {update}"
        )
    return tuple((name, rules[name]) for name in named)


def simulate(
    parameters: torch.nn.Module | Mapping[str, Tensor],
    compressor: MethodSpec | Auto,
    *,
    workers: int,
    memory: Memory | str | None = None,
    exchange: str = "auto",
    update: UpdateRule | Mapping[str, UpdateRule] | None = None,
    seed: int = 0,
    nan_policy: NanPolicy = "propagate",
    controller: Controller | str | None = None,
    cuda_graphs: bool = True,
    link: LinkModel | None = None,
    compute_s: float = 0.01,
    chunk_bytes: int = 0,
    optimizer: Optimizer | None = None,
    attacks: Mapping[int, Attack | str] | None = None,
) -> Simulation:
    """Returns N simulated workers for a model, or for tensors by name.

    With an `update` rule of `gradwire.optim`, of all parameters or by name, workers exchange the
    updates that they compute from their gradients: `step` returns the mean update, which the caller
    multiplies by minus the learning rate. Parameters of more than `chunk_bytes` are cut into
    chunks, as `attach` does, unless it is 0. A controller sees the times of a `link` (by default
    1 Gbit/s with 1 ms latency) and a step of `compute_s`, so that a run makes the same decisions on
    any machine. So does "auto", which also needs to know the `optimizer`. The workers of `attacks`,
    such as `{3: "alie:z=1.5"}`, are Byzantine: they replace their gradients before they compress.
    """
    check_whole("simulate", "workers", workers, 1)
    check_number("simulate", "compute_s", compute_s)
    if compute_s < 0:
        raise ConfigError(f"simulate: compute_s must be >= 0, got {compute_s!r}")
    if link is not None and not isinstance(link, LinkModel):
        raise ConfigError(f"simulate: link must be a LinkModel, got {link!r}")
    named = _named(parameters)
    auto = find_auto(compressor)
    if auto is not None:
        check_ranks(workers)
        check_alone(memory, exchange, controller)
    first = "none" if auto is not None or isinstance(compressor, Auto) else compressor
    check_whole("simulate", "chunk_bytes", chunk_bytes, 0)
    plan = make_plan(first, memory, exchange, named, workers)
    plan = replace(plan, rules=_rules(update, named))
    if plan.rules and controller is not None:
        raise ConfigError("simulate: a controller measures gradients, so it goes without update")
    plan = plan.in_chunks(named, chunk_bytes)
    attackers = Attackers(attacks, workers, seed) if attacks else None
    simulation = Simulation(
        [
            Engine(plan, named, rank, workers, seed, nan_policy, cuda_graphs, wants_mean=rank == 0)
            for rank in range(workers)
        ],
        attackers,
    )
    rule = find_controller(controller)
    if rule is not None:
        for worker, meter in zip(simulation.workers, simulation.network.meters, strict=True):
            clock = ModelClock(meter, link or LinkModel(), compute_s)
            worker.observer = ControllerRuntime(rule, worker, clock)
    if auto is not None:
        modelled = link or LinkModel()
        adaptive = None if optimizer is None else is_adaptive(optimizer)
        for worker, meter in zip(simulation.workers, simulation.network.meters, strict=True):
            clock = ModelClock(meter, modelled, compute_s)
            # Kernels take no time in the model of a step.
            worker.observer = automatic(
                auto, worker, clock, lambda: 0.0, modelled, adaptive, overlaps=False
            )
    return simulation
