"""BEER: gradient tracking with compressed differences, for smooth non-convex functions.

Zhao, Li, Li, Richtarik & Chi 2022, arXiv:2201.13320.
"""

from torch import nn
from torch.optim import Optimizer

from gradwire.decentralized.topology import Topology
from gradwire.decentralized.tracking import TrackingMethod
from gradwire.local.base import LocalNanPolicy
from gradwire.local.workers import Group
from gradwire.policies import MethodSpec


class BEER(TrackingMethod):
    """Averages parameters and tracked gradients through public copies that take all that is sent.

    X = X + gamma (W - I) H - lr V, H += C(X - H); V = V + gamma (W - I) Gh + G_new - G_old,
    Gh += C(V - Gh). These are the iterates of `CGT` with `alpha=1`: the papers send the same
    messages at other times. H starts from the common model and not from zero, which costs no bytes
    as all workers have it, and C(V - Gh) is sent from the first step on. In n steps a worker's
    squared gradient falls as 1/n, where that of `ChocoSGD` falls as n^(-2/3) and depends on how
    unlike the workers' data are. The compressor must be a contraction.

    The gradients of G_new - G_old are those of two consecutive mini-batches; the authors' code
    computes both on one mini-batch, which takes a second backward pass and a second model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: MethodSpec = "topk:ratio=0.1",
        *,
        gamma: float,
        topology: Topology | str = "ring",
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
        nan_policy: LocalNanPolicy = "raise",
    ) -> None:
        common = (process_group, seed, broadcast)
        TrackingMethod.__init__(
            self, model, optimizer, compressor, gamma, 1.0, topology, nan_policy, *common
        )
