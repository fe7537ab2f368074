"""Adam and AdamW with local moments and compressed updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire import kernels
from gradwire.auto.auto import Auto
from gradwire.base import Compressor, UpdateRule
from gradwire.errors import ConfigError
from gradwire.integrations.settings import Options, Settings
from gradwire.kernels.specs import AdamSpec, Moments
from gradwire.optim.base import CompressedOptimizer, Exchange, Groups
from gradwire.optim.groups import check_at_least_zero, read_betas
from gradwire.types import State

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class AdamUpdate(UpdateRule):
    """Adam's update m / (sqrt(v) + eps), where m and v are corrected for their start at zero.

    m and v are running means of the gradient and of its square (Kingma & Ba 2015,
    arXiv:1412.6980). A step whose square overflows is skipped.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 0.0

    name: ClassVar = "adam"

    def __post_init__(self) -> None:
        read_betas("adam", (self.beta1, self.beta2))
        check_at_least_zero("adam", "eps", self.eps)
        check_at_least_zero("adam", "clip", self.clip)

    def state(self, numel: int, device: torch.device) -> State:
        return {
            "exp_avg": torch.zeros(numel, device=device),
            "exp_avg_sq": torch.zeros(numel, device=device),
            # In float64, since its power is subtracted from 1.
            "step": torch.zeros((), dtype=torch.float64, device=device),
        }

    def update(self, grad: Tensor, state: State, pending: State) -> Tensor:
        step = torch.add(state["step"], 1, out=pending["step"])
        moments = Moments(
            state["exp_avg"], state["exp_avg_sq"], pending["exp_avg"], pending["exp_avg_sq"]
        )
        spec = AdamSpec(self.beta1, self.beta2, self.eps)
        kernels.on(grad.device).adam_update(grad.view(-1), moments, spec, step)
        return grad


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
        return adam_update_of("AdamW", group)


class Adam(CompressedOptimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) that exchanges updates of a DDP model.

    The arguments are those of `AdamW`. There is no weight decay, which in torch's Adam is added to
    the gradient and so becomes part of the moments: use `AdamW` for one.
    """

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
        return adam_update_of("Adam", group)


def adam_update_of(kind: str, group: Mapping[str, Any]) -> AdamUpdate:
    """Returns the rule of a group's options."""
    beta1, beta2 = read_betas(kind, group["betas"])
    check_at_least_zero(kind, "eps", group["eps"])
    check_at_least_zero(kind, "clip", group["clip"])
    return AdamUpdate(beta1, beta2, float(group["eps"]), float(group["clip"]))
