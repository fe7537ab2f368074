"""DSGD: a local step, then the average with the neighbors' parameters, in full precision.

Lian et al. 2017, arXiv:1705.09056. With `OnePeerExponential`: Assran et al. 2019, arXiv:1811.10792;
Ying et al. 2021, arXiv:2110.13363.
"""

from torch import nn
from torch.optim import Optimizer

from gradwire.decentralized.averaging import AveragingMethod
from gradwire.decentralized.topology import Topology
from gradwire.local.base import LocalNanPolicy
from gradwire.local.workers import Group


class DSGD(AveragingMethod):
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
        schedule, common = (topology, sync_every, nan_policy), (process_group, seed, broadcast)
        AveragingMethod.__init__(self, model, optimizer, "none", 1.0, False, *schedule, *common)
