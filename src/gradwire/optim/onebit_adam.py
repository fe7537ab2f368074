"""1-bit Adam: dense steps first, then a frozen variance and compressed momentum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.base import Compressor, UpdateRule
from gradwire.checks import check_whole
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.integrations.ddp import trained_parameters
from gradwire.integrations.settings import Options
from gradwire.optim.adam_update import AdamUpdate
from gradwire.optim.base import CompressedOptimizer, Exchange, Groups
from gradwire.optim.groups import check_at_least_zero, check_model, read_betas
from gradwire.types import State

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class OneBitAdamUpdate(UpdateRule):
    """Adam with a frozen second moment v: sends the momentum, and divides its mean by sqrt(v).

    A worker sends beta1 m + (1 - beta1) g of its own gradient g; the mean over workers becomes the
    m of all, and m / (sqrt(v) + eps) the update (Tang et al. 2021, arXiv:2102.02888). Both moments
    stay corrected for their start at zero, v for the steps it was updated in. Where v is zero, as
    in rows of an embedding that had no gradient before, nothing moves: one bit cannot encode the
    zero there. While nothing is compressed, `dense` is Adam.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 0.0

    name: ClassVar = "onebit_adam"
    keeps_mean: ClassVar = True

    def __post_init__(self) -> None:
        read_betas("onebit_adam", (self.beta1, self.beta2))
        check_at_least_zero("onebit_adam", "eps", self.eps)
        check_at_least_zero("onebit_adam", "clip", self.clip)

    def state(self, numel: int, device: torch.device) -> State:
        own = {"frozen_step": torch.zeros((), device=device)}
        return {**AdamUpdate().state(numel, device), **own}

    def update(self, grad: Tensor, state: State, pending: State) -> Tensor:
        """Returns the momentum with this worker's gradient, and freezes the second moment."""
        frozen = state["frozen_step"]
        pending["frozen_step"].copy_(torch.where(frozen > 0, frozen, state["step"]))
        torch.add(state["step"], 1, out=pending["step"])
        pending["exp_avg_sq"].copy_(state["exp_avg_sq"])
        flat = grad.view(-1)
        return flat.lerp_(state["exp_avg"], self.beta1).view(grad.shape)

    def of_mean(self, mean: Tensor, state: State, pending: State) -> Tensor:
        square = pending["exp_avg_sq"]
        moves, flat = square > 0, mean.view(-1)
        # Zero, but NaN where the mean is not finite.
        momentum = torch.where(moves, flat, flat * 0)
        pending["exp_avg"].copy_(momentum)
        mean_correction = 1 - self.beta1 ** pending["step"]
        square_correction = 1 - self.beta2 ** pending["frozen_step"]
        divisor = (square / square_correction).sqrt_().add_(self.eps).mul_(mean_correction)
        return torch.where(moves, momentum / divisor, momentum).view(mean.shape)

    def dense(self) -> UpdateRule:
        return AdamUpdate(self.beta1, self.beta2, self.eps, self.clip)


class OneBitAdam(CompressedOptimizer):
    """1-bit Adam (Tang et al. 2021, arXiv:2102.02888) of a DDP model.

    The first `warmup` steps are torch's fused AdamW on the mean gradient, 15 to 25 % of a run in
    the paper. Then the second moment is frozen, and the momentum goes through `compress`, any
    contraction, with error feedback. The `exchange` is then "sharded" unless another is given, so
    that the error of the second hop is fed back, too. Weight decay is decoupled. The other
    arguments are those of `AdamW`.
    """

    changeable = ("lr", "weight_decay", "compressed")

    def __init__(
        self,
        model: DDP,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup: int,
        compress: Compressor | str = "efsign",
        params: Groups = None,
        clip: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: "Unpack[Options]",
    ) -> None:
        check_whole("OneBitAdam", "warmup", warmup, 1)
        if "memory" in options:
            raise ConfigError("OneBitAdam: memory is part of the method, leave it out")
        exchange = options.get("exchange", "sharded")
        check_model("OneBitAdam", model)
        # What cannot work is refused here, and not after the warm-up.
        tensors = {name: p for p, name in trained_parameters(model).items()}
        workers = dist.get_world_size(process_group or model.process_group)
        if make_plan(compress, "residual", exchange, tensors, workers).is_dense:
            raise ConfigError(f"OneBitAdam: compress must be a contraction, got {compress!r}")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip": clip,
            "compressed": False,
        }  # fmt: skip
        self._warmup, self._compress, self._exchange = warmup, compress, exchange
        others = {name: value for name, value in options.items() if name != "exchange"}
        dense = Exchange("none", process_group, scaler, others)
        CompressedOptimizer.__init__(self, model, params, defaults, dense)
        self.register_step_post_hook(self._end_warmup)

    def rule(self, group: Mapping[str, Any], name: str, parameter: Tensor) -> UpdateRule:
        beta1, beta2 = read_betas("OneBitAdam", group["betas"])
        return OneBitAdamUpdate(beta1, beta2, float(group["eps"]), float(group["clip"]))

    def _end_warmup(self, *_: object) -> None:
        """Compresses from the next step on, after the last step of the warm-up."""
        if not self._is_dense():
            return
        self.link._complete_step()
        if self.link._engine.steps() >= self._warmup:
            self._begin_compression()

    def _begin_compression(self) -> None:
        self.link.switch(self._compress, memory="residual", exchange=self._exchange)
        for group in self.param_groups:
            group["compressed"] = True

    def _prepare_load(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Begins to compress if the saved run had."""
        if self._is_dense() and any(group.get("compressed") for group in groups):
            self._begin_compression()
