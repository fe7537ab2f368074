"""Averaging: workers step with their own gradients, then neighbors average parameters."""

from torch import nn
from torch.optim import Optimizer

from gradwire.checks import check_positive_fraction
from gradwire.comm.base import CollectiveProgram
from gradwire.decentralized.base import DecentralizedMethod
from gradwire.decentralized.gossip import Gossip, PublicCopies
from gradwire.decentralized.topology import Topology
from gradwire.local.base import LocalNanPolicy
from gradwire.local.workers import Group
from gradwire.policies import MethodSpec
from gradwire.types import State


class AveragingMethod(DecentralizedMethod):
    """Moves parameters, every `sync_every` steps, by `gamma` times the distance to the neighbors.

    That is the weighted mean of all public copies minus the worker's own copy.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: MethodSpec,
        gamma: float,
        fixed_weights: bool,
        topology: Topology | str,
        sync_every: int,
        nan_policy: LocalNanPolicy,
        group: Group,
        seed: int,
        broadcast: bool,
    ) -> None:
        check_positive_fraction(type(self).__name__, "gamma", gamma)
        common = (group, seed, broadcast)
        DecentralizedMethod.__init__(
            self, model, optimizer, topology, sync_every, nan_policy, *common
        )
        self.gamma = gamma
        self._copies = PublicCopies(self._make_engine(compressor, seed), self.parameters)
        self._gossip = self._make_gossip([self._copies], fixed_weights=fixed_weights)

    @property
    def gossip(self) -> Gossip:
        return self._gossip

    def settings(self) -> dict[str, object]:
        plan = self._copies.engine.plan.identity()
        return {**plan, **self.mixing.identity(), "gamma": self.gamma}

    def _initialize(self) -> None:
        self._copies.initialize(self._flat_parameters())

    def _step(self) -> None:
        if self.steps % self.sync_every == 0:
            self.syncs += 1
            self._workers.run(self._sync())

    def _sync(self) -> CollectiveProgram[None]:
        vectors = self._flat_parameters()
        message = self._gossip.encode([vectors])
        yield from self._gossip.exchange(message, self.syncs - 1, [vectors], self.gamma)
        self._write_back(vectors)

    def _tensors(self) -> dict[str, State]:
        return {"own": self._copies.own, "mixed": self._copies.mixed}
