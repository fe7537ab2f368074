"""Adam and AdamW with local moments and compressed updates."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.auto.auto import Auto
from gradwire.base import Compressor, UpdateRule
from gradwire.errors import ConfigError
from gradwire.integrations.settings import Options, Settings
from gradwire.optim.adam_update import adam_update_of
from gradwire.optim.base import CompressedOptimizer, Exchange, Groups

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AdamW(CompressedOptimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) that exchanges updates of a DDP model.

    `compress` is a method with its settings, as `gradwire.attach` takes, or `Settings`; further
    options are those of `Settings`. `params` are groups as torch's optimisers take, with `lr`,
    `betas`, `eps` and `weight_decay` of their own. `clip` above 0 bounds the norm of each tensor's
    gradient on this worker. With a GradScaler, pass it as `scaler`.
    """

    def __init__(
        self,
        model: DDP,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        compress: Compressor | str | Auto | Settings = "none",
        params: Groups = None,
        clip: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: "Unpack[Options]",
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip": clip
        }  # fmt: skip
        exchange = Exchange(compress, process_group, scaler, options)
        CompressedOptimizer.__init__(self, model, params, defaults, exchange)

    def rule(self, group: Mapping[str, Any], name: str, parameter: Tensor) -> UpdateRule:
        return adam_update_of("AdamW", group, self._workers)


class Adam(CompressedOptimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) that exchanges updates of a DDP model.

    The arguments are those of `AdamW`. There is no weight decay, which in torch's Adam is added to
    the gradient and so becomes part of the moments: use `AdamW` for one.
    """

    changeable = ("lr",)

    def __init__(
        self,
        model: DDP,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        compress: Compressor | str | Auto | Settings = "none",
        params: Groups = None,
        clip: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: "Unpack[Options]",
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip": clip
        }  # fmt: skip
        exchange = Exchange(compress, process_group, scaler, options)
        CompressedOptimizer.__init__(self, model, params, defaults, exchange)

    def rule(self, group: Mapping[str, Any], name: str, parameter: Tensor) -> UpdateRule:
        if group["weight_decay"]:
            raise ConfigError(
                "Adam: weight_decay must be 0, since Adam would add it to local gradients; use "
                f"gradwire.optim.AdamW, got {group['weight_decay']!r}"
            )
        return adam_update_of("Adam", group, self._workers)
