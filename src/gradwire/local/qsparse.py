"""Qsparse-local-SGD: local steps, then exchange of the sparsified and quantised drift.

Basu, Data, Karakus & Diggavi 2019, arXiv:1906.02367. Delayed means are applied as in CoCoD-SGD,
Shen et al. 2019, arXiv:1906.12043.
"""

from torch import nn
from torch.optim import Optimizer

from gradwire.base import Compressor, Memory
from gradwire.local.base import LocalNanPolicy
from gradwire.local.fragment import Outer
from gradwire.local.outer_loop import AnchoredSteps, Telling, kept_steps
from gradwire.local.workers import Group


class QsparseLocalSGD(AnchoredSteps):
    """Every `sync_every` steps workers move to the anchor minus the mean of what they say.

    A worker says C(m + anchor - x) of its parameters x and keeps the rest as its memory m. `m` is
    in units of the parameters, so a change of the learning rate needs no rescaling; with
    `forget_below=0.5` it is dropped at a sync where the rate is below half of what it was at the
    last one, as in the paper's experiments. Momentum and all else of the optimiser stay local. The
    compressor must be a contraction; an unbiased one that is none goes with `memory="none"`.

    With `delay` training goes on for so many steps while what was said is under way, and none of
    them is lost: x moves as far as the anchor then is from where x was when it was told. Until then
    a worker is where its own steps have led, or with `ahead` only that share of those it has told:
    a half, without momentum, keeps workers together at the learning rates of dense training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: Compressor | str = "topk:ratio=0.01 | qsgd:bits=4",
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
        telling = Telling(compressor, memory, exchange, nan_policy, forget_below)
        when, who = kept_steps(delay, ahead), (process_group, seed, broadcast)
        AnchoredSteps.__init__(self, model, optimizer, telling, Outer(), when, sync_every, *who)
