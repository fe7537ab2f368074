"""CHOCO-SGD: decentralised SGD whose workers send compressed differences to public copies.

Koloskova, Stich & Jaggi 2019, arXiv:1902.00340; for neural networks: Koloskova, Lin, Stich & Jaggi
2020, arXiv:1907.09356.
"""

from torch import nn
from torch.optim import Optimizer

from gradwire.decentralized.averaging import AveragingMethod
from gradwire.decentralized.topology import Topology
from gradwire.local.base import LocalNanPolicy
from gradwire.local.workers import Group
from gradwire.policies import MethodSpec


class ChocoSGD(AveragingMethod):
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
        schedule, common = (topology, sync_every, nan_policy), (process_group, seed, broadcast)
        AveragingMethod.__init__(
            self, model, optimizer, compressor, gamma, True, *schedule, *common
        )
