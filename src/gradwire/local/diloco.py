"""DiLoCo: many local steps, then one step of an outer optimizer along the mean drift.

Douillard et al. 2023, arXiv:2311.08105; in fragments with delay: Streaming DiLoCo, 2025,
arXiv:2501.18512.
"""

from torch import nn
from torch.optim import Optimizer

from gradwire.base import Compressor, Memory
from gradwire.local.base import LocalNanPolicy
from gradwire.local.fragment import Division, Outer
from gradwire.local.outer_loop import AnchoredSteps, Streaming, Telling
from gradwire.local.workers import Group


class DiLoCo(AnchoredSteps):
    """Every `sync_every` steps the anchor takes a Nesterov step along the workers' mean drift.

    The drift (anchor - parameters) goes in full precision, or as a compressor says it: fp16, or
    `codebook:bits=8,spread=12`. With `fragments` the model is told in that many parts, one every
    `sync_every / fragments` steps (or in the parts that you name, each by the beginnings of its
    parameters' names), so that the network is busy evenly. With `delay` training goes on for so
    many steps while a part is under way; then the anchor moves, and the parameters go there but for
    a share `alpha`, by default a half, that stays where those steps have led.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: Compressor | str = "none",
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        fragments: Division = 1,
        delay: int = 0,
        alpha: float | None = None,
        memory: Memory | str | None = None,
        exchange: str = "auto",
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
        nan_policy: LocalNanPolicy = "raise",
    ) -> None:
        alpha = (0.5 if delay else 0.0) if alpha is None else alpha
        telling = Telling(compressor, memory, exchange, nan_policy)
        outer = Outer(outer_lr, outer_momentum, nesterov)
        streaming = Streaming(fragments, delay, alpha)
        who = process_group, seed, broadcast
        AnchoredSteps.__init__(self, model, optimizer, telling, outer, streaming, sync_every, *who)
