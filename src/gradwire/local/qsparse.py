"""Qsparse-local-SGD: local steps, then exchange of the sparsified and quantised drift.

Basu, Data, Karakus & Diggavi 2019, arXiv:1906.02367. Delayed means are applied as in CoCoD-SGD,
Shen et al. 2019, arXiv:1906.12043.
"""

from torch import nn

from gradwire.base import Memory
from gradwire.local.base import LocalNanPolicy
from gradwire.local.fragment import OuterSGD
from gradwire.local.optimizers import Optimizers
from gradwire.local.outer_loop import DriftCompression, OuterLoopMethod, keep_local_steps
from gradwire.local.workers import Group
from gradwire.policies import MethodSpec


class QsparseLocalSGD(OuterLoopMethod):
    """Moves all workers to the anchor minus their mean compressed drift every `sync_every` steps.

    A worker with parameters x sends C(m + anchor - x) and keeps the rest as its residual m. `m` is
    in units of the parameters, so a change of the learning rate needs no rescaling; with
    `forget_below=0.5` it is dropped at a sync where the rate is below half of the last sync's, as
    in the paper's experiments. Momentum and all other optimiser state stay local. The compressor
    must be a contraction; an unbiased one that is not goes with `memory="none"`.

    With `delay` training continues for that many steps while the drift is in flight, and none of
    these steps is lost: x moves by the new anchor minus x as it was when the drift was captured.
    Until then a worker has all of its own steps, or with `ahead` only that fraction of those that
    it has sent: 0.5, without momentum, keeps workers together at the learning rates of dense
    training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        compressor: MethodSpec = "topk:ratio=0.01 | qsgd:bits=4",
        *,
        sync_every: int,
        delay: int = 0,
        ahead: float = 1.0,
        memory: Memory | str = "residual",
        forget_below: float | None = None,
        exchange: str = "auto",
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
        nan_policy: LocalNanPolicy = "raise",
    ) -> None:
        compression = DriftCompression(compressor, memory, exchange, nan_policy, forget_below)
        streaming, common = keep_local_steps(delay, ahead), (process_group, seed, broadcast)
        OuterLoopMethod.__init__(
            self, model, optimizer, compression, OuterSGD(), streaming, sync_every, *common
        )
