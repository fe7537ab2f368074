"""Local SGD: workers take steps of their own, and every so often meet at their mean.

Stich 2019, arXiv:1805.09767.
"""

from torch import nn
from torch.optim import Optimizer

from laconic.local.anchored import AnchoredSteps, Streaming, Telling
from laconic.local.fragment import Outer
from laconic.local.peers import Group


class LocalSGD(AnchoredSteps):
    """Every `sync_every` steps all workers' parameters become their mean, in full precision."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sync_every: int,
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
    ) -> None:
        # A mean of all there is shows by itself what is not finite.
        telling = Telling("none", "none", "auto", "ignore")
        who = process_group, seed, broadcast
        AnchoredSteps.__init__(
            self, model, optimizer, telling, Outer(), Streaming(), sync_every, *who
        )
