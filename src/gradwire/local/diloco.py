"""DiLoCo: many local steps, then one step of an outer optimizer along the mean drift.

Douillard et al. 2023, arXiv:2311.08105; in fragments with delay: Streaming DiLoCo, 2025,
arXiv:2501.18512.
"""

from torch import nn

from gradwire.base import Memory
from gradwire.local.anchors import Anchors
from gradwire.local.base import LocalNanPolicy
from gradwire.local.fragment import OuterSGD, Partition
from gradwire.local.optimizers import Optimizers
from gradwire.local.outer_loop import DriftCompression, OuterLoopMethod, Streaming
from gradwire.local.workers import Group
from gradwire.policies import MethodSpec


class DiLoCo(OuterLoopMethod):
    """Moves the anchor by a Nesterov step along the workers' mean drift every `sync_every` steps.

    The drift (anchor - parameters) is sent in full precision, or compressed, for example by fp16 or
    `codebook:bits=8,spread=12`. With `fragments` the model is synchronised in that many parts, one
    every `sync_every / fragments` steps, so that the network load is even; a list of lists names
    the parts by prefixes of parameter names. With `delay` training continues for that many steps
    while a part is in flight; then the anchor moves, and parameters become
    (1 - alpha) anchor + alpha parameters, where `alpha` is 0.5 by default. Anchors and outer
    momenta are kept on the device, or with `anchors` "host" or "bf16" in less of its memory.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        compressor: MethodSpec = "none",
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        fragments: Partition = 1,
        delay: int = 0,
        alpha: float | None = None,
        memory: Memory | str | None = None,
        exchange: str = "auto",
        anchors: Anchors = "device",
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
        nan_policy: LocalNanPolicy = "raise",
    ) -> None:
        alpha = (0.5 if delay else 0.0) if alpha is None else alpha
        compression = DriftCompression(compressor, memory, exchange, nan_policy)
        outer = OuterSGD(outer_lr, outer_momentum, nesterov)
        streaming = Streaming(fragments, delay, alpha)
        common = process_group, seed, broadcast, anchors
        OuterLoopMethod.__init__(
            self, model, optimizer, compression, outer, streaming, sync_every, *common
        )
