"""MuLoCo: Muon inside DiLoCo, whose drifts compress well.

Therien et al. 2025, arXiv:2505.23725.
"""

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from gradwire.base.matrices import Predicate, chosen_matrices, hidden_matrices
from gradwire.errors import ConfigError
from gradwire.local.anchors import Anchors
from gradwire.local.base import LocalNanPolicy
from gradwire.local.fragment import OuterSGD, Partition
from gradwire.local.optimizers import Optimizers
from gradwire.local.outer_loop import DriftCompression, OuterLoopMethod, Streaming
from gradwire.local.workers import Group
from gradwire.memory.residual import Residual
from gradwire.policies import MethodSpec


def muon_and_adamw(
    model: nn.Module,
    lr: float = 1e-3,
    *,
    adamw_lr: float | None = None,
    momentum: float = 0.9,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.95),
    matrices: Predicate | None = None,
) -> list[Optimizer]:
    """Returns torch's Muon for the hidden matrices of a model, and AdamW for all other parameters.

    `matrices(name, parameter)` returns whether Muon takes a parameter; by default it takes those of
    `gradwire.base.matrices.hidden_matrices` that have two dimensions, since torch's Muon takes no
    others. Its updates have the size of AdamW's, so that one rate suits both; `adamw_lr` None means
    `lr`. Weight decay is that of matrices; AdamW decays nothing. An optimiser without parameters is
    left out. Raises ConfigError with torch before 2.9, which has no Muon.
    """
    muon = vars(torch.optim).get("Muon")
    if muon is None:
        raise ConfigError(
            f"muon_and_adamw: torch has Muon since 2.9, this is {torch.__version__}; upgrade it, "
            "or give MuLoCo optimisers of your own"
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if matrices is None:
        names = frozenset(n for n in hidden_matrices(model) & {*trained} if trained[n].dim() == 2)
    else:
        names = chosen_matrices("muon_and_adamw", trained, matrices)
        for name in names:
            if trained[name].dim() != 2:
                shape = tuple(trained[name].shape)
                raise ConfigError(
                    "muon_and_adamw: torch's Muon takes parameters of two dimensions, got "
                    f"{name!r} of shape {shape}"
                )
    hidden = [p for name, p in trained.items() if name in names]
    others = [p for name, p in trained.items() if name not in names]
    found: list[Optimizer] = []
    if hidden:
        found.append(
            muon(
                hidden,
                lr,
                weight_decay=weight_decay,
                momentum=momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if others:
        rate = lr if adamw_lr is None else adamw_lr
        found.append(AdamW(others, rate, betas=betas, weight_decay=0.0))
    return found


class MuLoCo(OuterLoopMethod):
    """DiLoCo with the settings of its Muon recipe; `optimizer` are those of `muon_and_adamw`.

    Every `sync_every` steps the anchor moves by a Nesterov step along the workers' mean drift. With
    a compressor, such as `codebook:bits=2` or `topk:ratio=0.1`, workers send e = decay e + drift
    and keep in e what was not sent. The other arguments are those of `DiLoCo`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        compressor: MethodSpec = "none",
        *,
        sync_every: int = 30,
        outer_lr: float = 0.8,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        decay: float = 0.9,
        fragments: Partition = 1,
        delay: int = 0,
        alpha: float | None = None,
        exchange: str = "auto",
        anchors: Anchors = "device",
        process_group: Group = None,
        seed: int = 0,
        broadcast: bool = False,
        nan_policy: LocalNanPolicy = "raise",
    ) -> None:
        alpha = (0.5 if delay else 0.0) if alpha is None else alpha
        compression = DriftCompression(compressor, Residual(decay), exchange, nan_policy)
        outer = OuterSGD(outer_lr, outer_momentum, nesterov)
        streaming = Streaming(fragments, delay, alpha)
        common = process_group, seed, broadcast, anchors
        OuterLoopMethod.__init__(
            self, model, optimizer, compression, outer, streaming, sync_every, *common
        )
