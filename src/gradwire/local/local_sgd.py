"""Local SGD: workers take local steps, and every few steps average their parameters.

Stich 2019, arXiv:1805.09767. With delayed means: CoCoD-SGD, Shen et al. 2019, arXiv:1906.12043;
DaSGD, Zhou et al. 2020.
"""

from torch import nn
from torch.optim import Optimizer

from gradwire.local.fragment import Outer
from gradwire.local.outer_loop import AnchoredSteps, Telling, kept_steps
from gradwire.local.workers import Group


class LocalSGD(AnchoredSteps):
    """Every `sync_every` steps all workers' parameters become their mean, in full precision.

    With `delay` the mean is taken up so many steps later, and the steps taken since it set out stay
    on top of it. Until then a worker is where its own steps have led, or with `ahead` only that
    share of those it has told (see `QsparseLocalSGD`).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sync_every: int,
        delay: int = 0,
        ahead: float = 1.0,
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
    ) -> None:
        # A mean of all there is shows by itself what is not finite.
        telling = Telling("none", "none", "auto", "ignore")
        when, who = kept_steps(delay, ahead), (process_group, seed, broadcast)
        AnchoredSteps.__init__(self, model, optimizer, telling, Outer(), when, sync_every, *who)
