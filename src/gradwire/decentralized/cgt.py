"""C-GT: gradient tracking in which both exchanges are compressed, with a linear rate.

Liao, Li, Huang & Pu 2022, arXiv:2205.12623.
"""

from torch import nn
from torch.optim import Optimizer

from gradwire.decentralized.topology import Topology
from gradwire.decentralized.tracking import TrackingMethod
from gradwire.local.base import LocalNanPolicy
from gradwire.local.workers import Group
from gradwire.policies import MethodSpec


class CGT(TrackingMethod):
    """Averages parameters and tracked gradients with the neighbors, through compressed differences.

    With public copies H of Z, which is X or Y, a worker sends q = C(Z - H), and all take
    Zhat = H + q and H += alpha q. Then X = X - lr Y - gamma (Xhat - W Xhat) and
    Y = Y - gamma (Yhat - W Yhat) + G_new - G_old. With full gradients of strongly convex functions
    all workers reach the optimum of the sum at a linear rate, however unlike their data are. An
    `alpha` below 1 allows compressors that are no contraction, such as an unbiased quantiser of few
    bits. `gamma` is found as that of `ChocoSGD`.

    The optimiser's step uses Y, which also replaces `.grad`; momentum and weight decay act on it
    locally, though the proof is for plain SGD. Two messages a step, and up to six float32 copies of
    the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: MethodSpec = "topk:ratio=0.1",
        *,
        gamma: float,
        alpha: float = 1.0,
        topology: Topology | str = "ring",
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
        nan_policy: LocalNanPolicy = "raise",
    ) -> None:
        common = (process_group, seed, broadcast)
        TrackingMethod.__init__(
            self, model, optimizer, compressor, gamma, alpha, topology, nan_policy, *common
        )
