"""N workers in lock step in this process: the same lanes, no network, exact bytes."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.base import Compressor, Memory
from gradwire.checkpoint.state import load, own_part, save
from gradwire.checks import check_number, check_whole
from gradwire.comm.cost_model import LinkModel
from gradwire.comm.simulated import Simulated
from gradwire.control.base import Controller, find_controller
from gradwire.control.timing import ModelClock
from gradwire.engine.engine import Engine, NanPolicy
from gradwire.engine.plan import make_plan
from gradwire.errors import ConfigError


class Simulation:
    """Workers that exchange the gradients they are given, as real ranks would."""

    def __init__(self, workers: Sequence[Engine]) -> None:
        self.workers = workers
        self.network = Simulated(len(workers))
        self._rooms: dict[tuple[int | str, ...], list[Tensor]] = {}

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """One gradient by name from each worker; returns the mean that all of them receive."""
        if not isinstance(gradients, Sequence):
            kind = type(gradients).__name__
            raise ConfigError(f"step: expected a list with gradients of each worker, got {kind}")
        if len(gradients) != len(self.workers):
            raise ConfigError(f"{len(gradients)} gradients for {len(self.workers)} workers")
        names = list(_mapping(0, gradients[0]))
        for rank, worker in enumerate(self.workers):
            _check_gradients(rank, _mapping(rank, gradients[rank]), names, worker.tensors)
        means = [self._copies(rank, given) for rank, given in enumerate(gradients)]
        talks = [w.talk(names, m) for w, m in zip(self.workers, means, strict=True)]
        self.network.run(talks)
        for worker in self.workers:
            worker.finish()
        complaints = [worker.settle(wait=False) for worker in self.workers]
        if complaints[0] is not None:
            raise complaints[0]
        # Not the copies themselves, where the next step would write into them.
        given_out = [mean.clone() for mean in means[0]] if self._rooms else means[0]
        return dict(zip(names, given_out, strict=True))

    def _copies(self, rank: int, given: Mapping[str, Tensor]) -> list[Tensor]:
        """What a worker may overwrite; on a GPU in the same place at every step."""
        grads = [grad.detach() for grad in given.values()]
        if not grads or not grads[0].is_cuda:
            return [grad.clone() for grad in grads]
        room = self._rooms.setdefault((rank, *given), [torch.empty_like(grad) for grad in grads])
        torch._foreach_copy_(room, grads)
        return room

    def switch(
        self,
        compressor: Compressor | str,
        *,
        memory: Memory | str | None = None,
        exchange: str = "auto",
    ) -> None:
        """Changes the method of all workers between two steps; residuals are kept."""
        tensors = self.workers[0].tensors.values()
        plan = make_plan(compressor, memory, exchange, tensors, len(self.workers))
        for worker in self.workers:
            worker.switch(plan)

    def epoch_ended(self, learning_rate: float | None = None) -> None:
        """Tells the controllers, with the learning rate of the next epoch if that matters."""
        for worker in self.workers:
            worker.epoch_ended(learning_rate)

    def stats(self) -> dict[str, object]:
        """The statistics of worker 0."""
        return self.workers[0].stats(self.network.meters[0])

    def state_dict(self) -> dict[str, object]:
        return {str(rank): save(worker) for rank, worker in enumerate(self.workers)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, object]]) -> None:
        for rank, worker in enumerate(self.workers):
            load(worker, own_part(state, str(rank)))


def _mapping(rank: int, given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What a worker gives, if it is gradients by name."""
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise ConfigError(f"worker {rank}: expected gradients by name, got {kind}")
    return given


def _check_gradients(
    rank: int, given: Mapping[str, Tensor], names: list[str], tensors: Mapping[str, Tensor]
) -> None:
    """Raises ConfigError unless a worker gives what worker 0 gives, in the parameters' shapes."""
    if list(given) != names or not tensors.keys() >= given.keys():
        raise ConfigError(f"worker {rank} gives {list(given)}, expected {names} of {[*tensors]}")
    for name, gradient in given.items():
        shape = tensors[name].shape
        if not isinstance(gradient, Tensor):
            kind = type(gradient).__name__
            raise ConfigError(f"worker {rank}: gradient {name} must be a tensor, got {kind}")
        if gradient.shape != shape:
            has = tuple(gradient.shape)
            raise ConfigError(f"worker {rank}: gradient {name} is {has}, expected {tuple(shape)}")


def _named(parameters: torch.nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that are trained, by name."""
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


def simulate(
    parameters: torch.nn.Module | Mapping[str, Tensor],
    compressor: Compressor | str,
    *,
    workers: int,
    memory: Memory | str | None = None,
    exchange: str = "auto",
    seed: int = 0,
    nan_policy: NanPolicy = "propagate",
    controller: Controller | str | None = None,
    cuda_graphs: bool = True,
    link: LinkModel | None = None,
    compute_s: float = 0.01,
) -> Simulation:
    """N simulated workers for a model, or for tensors by name.

    A controller is told times as a `link` would have them (by default 1 Gbit/s with 1 ms latency)
    beside a step of `compute_s`, so that the same run decides the same anywhere.
    """
    check_whole("simulate", "workers", workers, 1)
    check_number("simulate", "compute_s", compute_s)
    if compute_s < 0:
        raise ConfigError(f"simulate: compute_s must be >= 0, got {compute_s!r}")
    if link is not None and not isinstance(link, LinkModel):
        raise ConfigError(f"simulate: link must be a LinkModel, got {link!r}")
    named = _named(parameters)
    plan = make_plan(compressor, memory, exchange, named.values(), workers)
    simulation = Simulation(
        [
            Engine(plan, named, rank, workers, seed, nan_policy, cuda_graphs, wants_mean=rank == 0)
            for rank in range(workers)
        ]
    )
    rule = find_controller(controller)
    if rule is not None:
        for worker, meter in zip(simulation.workers, simulation.network.meters, strict=True):
            worker.steer(rule, ModelClock(meter, link or LinkModel(), compute_s))
    return simulation
