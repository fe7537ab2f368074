"""DSGD: a local step, then the average with the neighbors' parameters, in full precision.

Lian et al. 2017, arXiv:1705.09056. With `OnePeerExponential`: Assran et al. 2019, arXiv:1811.10792;
Ying et al. 2021, arXiv:2110.13363.
"""

from torch import nn
from torch.optim import Optimizer

from gradwire.comm.base import CollectiveProgram
from gradwire.decentralized.base import DecentralizedMethod
from gradwire.decentralized.gossip import Gossip, PublicCopies
from gradwire.decentralized.topology import Topology
from gradwire.local.base import LocalNanPolicy
from gradwire.local.workers import Group
from gradwire.types import State


class DSGD(DecentralizedMethod):
    """Replaces a worker's parameters by the weighted mean of its neighbors' and its own.

    X = W (X - lr G), every `sync_every` steps. The optimiser's state, such as momentum, stays
    local. Where the workers' data differ, the models settle at a distance from the optimum that
    grows with the learning rate and shrinks with the spectral gap; `CGT` and `BEER` have no such
    bias. Weights may alternate between steps, as those of `OnePeerExponential` do.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        topology: Topology | str = "ring",
        sync_every: int = 1,
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
        nan_policy: LocalNanPolicy = "raise",
    ) -> None:
        common = (process_group, seed, broadcast)
        DecentralizedMethod.__init__(
            self, model, optimizer, topology, sync_every, nan_policy, *common
        )
        copies = PublicCopies(self._make_engine("none", seed), self.parameters)
        self._gossip = self._make_gossip([copies], fixed_weights=False)

    @property
    def gossip(self) -> Gossip:
        return self._gossip

    def settings(self) -> dict[str, object]:
        return self.mixing.identity()

    def _initialize(self) -> None:
        """Does nothing: parameters are sent as they are."""

    def _step(self) -> None:
        if self.steps % self.sync_every == 0:
            self.syncs += 1
            self._workers.run(self._sync())

    def _sync(self) -> CollectiveProgram[None]:
        vectors = self._flat_parameters()
        message = self._gossip.encode([vectors])
        yield from self._gossip.exchange(message, self.syncs - 1, [vectors], 1.0)
        self._write_back(vectors)

    def _tensors(self) -> dict[str, State]:
        return {}
