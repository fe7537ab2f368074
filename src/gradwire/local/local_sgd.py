"""Local SGD: workers take local steps, and every few steps average their parameters.

Stich 2019, arXiv:1805.09767. With delayed means: CoCoD-SGD, Shen et al. 2019, arXiv:1906.12043;
DaSGD, Zhou et al. 2020.
"""

from torch import nn

from gradwire.local.fragment import OuterSGD
from gradwire.local.optimizers import Optimizers
from gradwire.local.outer_loop import DriftCompression, OuterLoopMethod, keep_local_steps
from gradwire.local.workers import Group


class LocalSGD(OuterLoopMethod):
    """Averages the parameters of all workers every `sync_every` steps, in full precision.

    With `delay` the mean is applied that many steps later, and the steps taken in the meantime stay
    on top of it. Until then a worker has all of its own steps, or with `ahead` only that fraction
    of those that it has sent (see `QsparseLocalSGD`).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        sync_every: int,
        delay: int = 0,
        ahead: float = 1.0,
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
    ) -> None:
        # A dense mean propagates non-finite values by itself.
        compression = DriftCompression("none", "none", "auto", "ignore")
        streaming, common = keep_local_steps(delay, ahead), (process_group, seed, broadcast)
        OuterLoopMethod.__init__(
            self, model, optimizer, compression, OuterSGD(), streaming, sync_every, *common
        )
