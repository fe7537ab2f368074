"""The update of Adam and AdamW as a rule."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import UpdateRule
from gradwire.kernels.specs import AdamSpec, Moments
from gradwire.optim.groups import check_at_least_zero, read_betas
from gradwire.types import State


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
            # As torch's fused kernel takes it; exact up to 16 million steps.
            "step": torch.zeros((), device=device),
        }

    def update(self, grad: Tensor, state: State, pending: State) -> Tensor:
        step = torch.add(state["step"], 1, out=pending["step"])
        moments = Moments(
            state["exp_avg"], state["exp_avg_sq"], pending["exp_avg"], pending["exp_avg_sq"]
        )
        spec = AdamSpec(self.beta1, self.beta2, self.eps)
        kernels.on(grad.device).adam_update(grad.view(-1), moments, spec, step)
        return grad


def adam_update_of(kind: str, group: Mapping[str, Any]) -> AdamUpdate:
    """Returns the rule of a group's options."""
    beta1, beta2 = read_betas(kind, group["betas"])
    check_at_least_zero(kind, "eps", group["eps"])
    check_at_least_zero(kind, "clip", group["clip"])
    return AdamUpdate(beta1, beta2, float(group["eps"]), float(group["clip"]))
