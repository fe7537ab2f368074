"""SparseLoCo: DiLoCo with error feedback that sends 2 bits for one entry in 64 of the drift.

Sarfi et al. 2025, arXiv:2508.15706.
"""

from torch import nn

from gradwire.local.anchors import Anchors
from gradwire.local.base import LocalNanPolicy
from gradwire.local.fragment import OuterSGD, Partition
from gradwire.local.optimizers import Optimizers
from gradwire.local.outer_loop import DriftCompression, OuterLoopMethod, Streaming
from gradwire.local.workers import Group
from gradwire.memory.residual import Residual
from gradwire.policies import MethodSpec

SPARSE_2_BITS = "chunktopk:k=64,chunk=4096,square=true | codebook:bits=2"
"""Sends 64 entries of every square of 64 by 64, in 2 bits each."""


class SparseLoCo(OuterLoopMethod):
    """Sends the largest entries of e = decay e + drift every `sync_every` steps; e keeps the rest.

    The anchor moves by `outer_lr` times the mean of what was sent, without momentum, whose part the
    error feedback plays. By default 64 entries of every square of 64 by 64 are sent as 2 bits each
    and their positions, in 0.16 bits a parameter: some 200 times less than float32 at every sync.
    What a worker sent of a tensor is scaled down to the median norm of all workers if it is above
    that, before the mean; `exchange="gather"` takes the plain mean. For workers that are not to be
    trusted see `exchange="gather:aggregate=median"`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        compressor: MethodSpec = SPARSE_2_BITS,
        *,
        sync_every: int,
        decay: float = 0.95,
        outer_lr: float = 1.0,
        fragments: Partition = 1,
        delay: int = 0,
        alpha: float | None = None,
        exchange: str = "gather:aggregate=median_norm",
        anchors: Anchors = "device",
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
        nan_policy: LocalNanPolicy = "raise",
    ) -> None:
        alpha = (0.5 if delay else 0.0) if alpha is None else alpha
        compression = DriftCompression(compressor, Residual(decay), exchange, nan_policy)
        streaming = Streaming(fragments, delay, alpha)
        common = process_group, seed, broadcast, anchors
        OuterLoopMethod.__init__(
            self, model, optimizer, compression, OuterSGD(outer_lr), streaming, sync_every, *common
        )
