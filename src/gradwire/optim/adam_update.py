"""The update of Adam and AdamW as a rule."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import UpdateRule
from gradwire.checks import check_whole
from gradwire.kernels.specs import AdamSpec, Moments
from gradwire.optim.groups import check_at_least_zero, read_betas
from gradwire.types import State


@dataclass(frozen=True)
class AdamUpdate(UpdateRule):
    """Adam's update m / (sqrt(v) + eps), where m and v are corrected for their start at zero.

    m and v are running means of the gradient and of its square (Kingma & Ba 2015,
    arXiv:1412.6980). A step whose square overflows is skipped.

    With `workers` above 1 the divisor is that of a mean over so many workers: a worker's v has the
    square of the signal and the whole variance of its noise, of which the mean gradient has only a
    share of 1 / n. Since m^2 estimates the square of the signal, (v + (n - 1) m^2) / n takes the
    place of v. Otherwise updates would be too short, by up to sqrt(n).
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 0.0
    workers: int = field(default=1, compare=False)
    """The number of workers whose updates are averaged; a state suits any number."""

    name: ClassVar = "adam"

    def __post_init__(self) -> None:
        read_betas("adam", (self.beta1, self.beta2))
        check_at_least_zero("adam", "eps", self.eps)
        check_at_least_zero("adam", "clip", self.clip)
        check_whole("adam", "workers", self.workers, 1)

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
        spec = AdamSpec(self.beta1, self.beta2, self.eps, self.workers)
        kernels.on(grad.device).adam_update(grad.view(-1), moments, spec, step)
        return grad

    def dense(self) -> UpdateRule:
        """Returns the rule for the mean gradient, of which there is one."""
        return replace(self, workers=1)


def adam_update_of(kind: str, group: Mapping[str, Any], workers: int) -> AdamUpdate:
    """Returns the rule of a group's options, for a mean over so many workers."""
    beta1, beta2 = read_betas(kind, group["betas"])
    check_at_least_zero(kind, "eps", group["eps"])
    check_at_least_zero(kind, "clip", group["clip"])
    return AdamUpdate(beta1, beta2, float(group["eps"]), float(group["clip"]), workers)
