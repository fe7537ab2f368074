"""CHOCO-SGD: decentralised SGD whose workers send compressed differences to public copies.

Koloskova, Stich & Jaggi 2019, arXiv:1902.00340; for neural networks: Koloskova, Lin, Stich & Jaggi
2020, arXiv:1907.09356.
"""

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


class ChocoSGD(DecentralizedMethod):
    """Moves a worker, after its own step, towards the public copies of its neighbors.

    A worker with parameters x and public copy h sends q = C(x - h); all that know the copy add q to
    it, and x += gamma * (weighted mean of the copies - h). The optimiser's step is local, momentum
    and weight decay included. The mean of all workers is kept, whatever `gamma` and the compressor.
    A stronger compressor needs a smaller `gamma`: with one that is too large the workers drift
    apart and diverge, so search 0.5, 0.3, 0.1, 0.03 downwards and watch `neighbor_distance` in
    `stats()`. As with `DSGD` there is a bias where the workers' data differ.

    Of each compressed parameter two float32 copies are kept, whatever the number of neighbors.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: MethodSpec = "topk:ratio=0.01",
        *,
        gamma: float,
        topology: Topology | str = "ring",
        sync_every: int = 1,
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
        nan_policy: LocalNanPolicy = "raise",
    ) -> None:
        check_positive_fraction("ChocoSGD", "gamma", gamma)
        common = (process_group, seed, broadcast)
        DecentralizedMethod.__init__(
            self, model, optimizer, topology, sync_every, nan_policy, *common
        )
        self.gamma = gamma
        self._copies = PublicCopies(self._make_engine(compressor, seed), self.parameters)
        self._gossip = self._make_gossip([self._copies])

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
