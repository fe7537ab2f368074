"""Gradient tracking: each worker follows an estimate of the gradient averaged over all workers.

The estimate y of a worker starts from its own gradient. Each step adds the change of that gradient,
and averages y with the neighbors, as it does the parameters: so the mean of all y is always the
mean of all gradients, and no bias is left where the workers' data differ. The difference is between
the gradients of two consecutive mini-batches, each at its own parameters, as a training loop
computes them; it is not taken twice on one mini-batch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.checks import check_positive_fraction
from gradwire.comm.base import CollectiveProgram
from gradwire.decentralized.base import DecentralizedMethod
from gradwire.decentralized.gossip import Gossip, PublicCopies, wide_copies
from gradwire.decentralized.topology import Topology
from gradwire.errors import ConfigError
from gradwire.local.base import LocalNanPolicy
from gradwire.local.workers import Group
from gradwire.policies import MethodSpec
from gradwire.types import State, mix


class TrackingMethod(DecentralizedMethod):
    """Replaces gradients by tracked ones before the optimiser's step; afterwards exchanges both.

    A message holds the compressed parameters, as they are before the step, and the compressed
    tracker. In each the public copies keep the share `damping` of what is sent.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: MethodSpec,
        gamma: float,
        damping: float,
        topology: Topology | str,
        nan_policy: LocalNanPolicy,
        group: Group,
        seed: int,
        broadcast: bool,
    ) -> None:
        method = type(self).__name__
        check_positive_fraction(method, "gamma", gamma)
        check_positive_fraction(method, "alpha", damping)
        DecentralizedMethod.__init__(
            self, model, optimizer, topology, 1, nan_policy, group, seed, broadcast
        )
        self.gamma, self.damping = gamma, damping
        self.tracker = wide_copies(self.parameters)
        self._gradient = {name: torch.zeros_like(copy) for name, copy in self.tracker.items()}
        contraction = damping == 1
        engines = [
            # Each draws random numbers of its own.
            self._make_engine(compressor, mix(seed, number), needs_contraction=contraction)
            for number in (1, 2)
        ]
        likes: tuple[Mapping[str, Tensor], ...] = (self.parameters, self.tracker)
        self._copies = [
            PublicCopies(engine, like, damping) for engine, like in zip(engines, likes, strict=True)
        ]
        self._gossip = self._make_gossip(self._copies)
        self._message: Tensor | None = None
        self._before_step = self._track

    @property
    def gossip(self) -> Gossip:
        return self._gossip

    def settings(self) -> dict[str, object]:
        plan = self._copies[0].engine.plan.identity()
        return {**plan, **self.mixing.identity(), "gamma": self.gamma, "damping": self.damping}

    def tracked_gradient(self) -> State:
        """Returns this worker's estimate of the mean gradient of all workers, by name."""
        return {n: y.view(self.parameters[n].shape) for n, y in self.tracker.items()}

    def _initialize(self) -> None:
        self._copies[0].initialize(self._flat_parameters())
        torch._foreach_zero_([*self.tracker.values(), *self._gradient.values()])
        self._copies[1].initialize(self.tracker)

    def _track(
        self, optimizer: Optimizer, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> None:
        """Gives the optimiser the tracked gradient, and encodes it with the parameters."""
        # The first argument is the optimiser itself.
        if any(value is not None for value in (*args[1:], options.get("closure"))):
            raise ConfigError(
                f"{type(self).__name__}: a closure computes gradients inside the step, where they "
                "cannot be tracked; compute them first, then call optimizer.step()"
            )
        self._workers.check_finished()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                tracker, before = self.tracker[name], self._gradient[name]
                gradient = torch.zeros_like(tracker)
                if parameter.grad is not None:
                    gradient.copy_(parameter.grad.reshape(-1))
                tracker.add_(gradient - before)
                before.copy_(gradient)
                tracked = tracker.view(parameter.shape).to(parameter.dtype)
                if parameter.grad is None:
                    parameter.grad = tracked.clone()
                else:
                    parameter.grad.copy_(tracked)
            self._message = self._gossip.encode([self._flat_parameters(), self.tracker])

    def _step(self) -> None:
        self.syncs += 1
        self._workers.run(self._sync())

    def _sync(self) -> CollectiveProgram[None]:
        """Computes X -= gamma (Xhat - W Xhat), after the step, and Y -= gamma (Yhat - W Yhat)."""
        assert self._message is not None, "a step has begun without its hook"
        message, self._message = self._message, None
        vectors = self._flat_parameters()
        yield from self._gossip.exchange(
            message, self.syncs - 1, [vectors, self.tracker], self.gamma
        )
        self._write_back(vectors)

    def _tensors(self) -> dict[str, State]:
        parameters, tracker = self._copies
        return {
            "own": parameters.own,
            "mixed": parameters.mixed,
            "tracker_own": tracker.own,
            "tracker_mixed": tracker.mixed,
            "tracker": self.tracker,
            "gradient": self._gradient,
        }
