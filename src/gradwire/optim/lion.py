"""Lion with local momentum and compressed updates."""

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
from gradwire.integrations.settings import Options, Settings
from gradwire.optim.base import CompressedOptimizer, Exchange, Groups
from gradwire.optim.groups import check_at_least_zero, read_betas
from gradwire.types import State

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class LionUpdate(UpdateRule):
    """Lion's update sign(beta1 m + (1 - beta1) g); then m becomes beta2 m + (1 - beta2) g.

    Chen et al. 2023, arXiv:2302.06675.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    clip: float = 0.0

    name: ClassVar = "lion"

    def __post_init__(self) -> None:
        read_betas("lion", (self.beta1, self.beta2))
        check_at_least_zero("lion", "clip", self.clip)

    def state(self, numel: int, device: torch.device) -> State:
        return {"exp_avg": torch.zeros(numel, device=device)}

    def update(self, grad: Tensor, state: State, pending: State) -> Tensor:
        kernels.on(grad.device).lion_update(
            grad.view(-1), state["exp_avg"], pending["exp_avg"], self.beta1, self.beta2
        )
        return grad


class Lion(CompressedOptimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675) that exchanges updates of a DDP model.

    A worker's update is a sign; the parameters follow the mean of all workers' signs. The other
    arguments are those of `AdamW`.
    """

    def __init__(
        self,
        model: DDP,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        compress: Compressor | str | Auto | Settings = "none",
        params: Groups = None,
        clip: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: "Unpack[Options]",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "clip": clip}
        exchange = Exchange(compress, process_group, scaler, options)
        CompressedOptimizer.__init__(self, model, params, defaults, exchange)

    def rule(self, group: Mapping[str, Any], name: str, parameter: Tensor) -> UpdateRule:
        beta1, beta2 = read_betas("Lion", group["betas"])
        check_at_least_zero("Lion", "clip", group["clip"])
        return LionUpdate(beta1, beta2, float(group["clip"]))
