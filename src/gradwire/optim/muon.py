"""Muon with local momentum and compressed updates; AdamW for all that is no hidden matrix."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.auto.auto import Auto
from gradwire.base import Compressor, UpdateRule
from gradwire.base.matrices import Predicate, chosen_matrices, hidden_matrices
from gradwire.checks import check_flag, check_fraction_below_one, check_whole
from gradwire.errors import ConfigError
from gradwire.integrations.ddp import trained_parameters
from gradwire.integrations.settings import Options, Settings
from gradwire.optim.adam_update import adam_update_of
from gradwire.optim.base import CompressedOptimizer, Exchange, Groups
from gradwire.optim.groups import check_at_least_zero, check_model
from gradwire.types import State

if TYPE_CHECKING:
    from typing_extensions import Unpack

AdjustRate: TypeAlias = Literal["match_rms_adamw", "original"]
"""Factor of a matrix's update: 0.2 sqrt(max(rows, columns)), so that its size is about that of
AdamW's and one learning rate serves both (Liu et al. 2025, arXiv:2502.16982), or
sqrt(max(1, rows / columns))."""

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the quintic Newton-Schulz iteration, which takes singular values to about 0.7 to 1.2."""

EPS = 1e-7
"""Least norm that a momentum is divided by."""


@dataclass(frozen=True)
class MuonUpdate(UpdateRule):
    """Muon's update: the momentum of a matrix, with its singular values brought close to 1.

    The momentum is m = momentum m + (1 - momentum) g, or with `nesterov` the mix of g and that by
    the same weights; Newton-Schulz iterations make it orthonormal (Jordan et al. 2024,
    kellerjordan.github.io/posts/muon). A tensor of more dimensions is a matrix whose rows are its
    first. On a GPU the iterations run in bfloat16, on a CPU in float32.
    """

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust: AdjustRate = "match_rms_adamw"
    clip: float = 0.0

    name: ClassVar = "muon"
    is_elementwise: ClassVar = False

    def __post_init__(self) -> None:
        check_fraction_below_one("muon", "momentum", self.momentum)
        check_flag("muon", "nesterov", self.nesterov)
        check_whole("muon", "ns_steps", self.ns_steps, 1, 99)
        check_at_least_zero("muon", "clip", self.clip)
        if self.adjust not in get_args(AdjustRate):
            known = [*get_args(AdjustRate)]
            raise ConfigError(f"muon: adjust must be one of {known}, got {self.adjust!r}")

    def state(self, numel: int, device: torch.device) -> State:
        return {"momentum_buffer": torch.zeros(numel, device=device)}

    def update(self, grad: Tensor, state: State, pending: State) -> Tensor:
        flat, weight = grad.view(-1), 1 - self.momentum
        momentum = torch.lerp(
            state["momentum_buffer"], flat, weight, out=pending["momentum_buffer"]
        )
        mixed = flat.lerp(momentum, self.momentum) if self.nesterov else momentum
        matrix = mixed.view(grad.shape[0], -1)
        return orthonormalised(matrix, self.ns_steps).mul_(self._factor(*matrix.shape))

    def _factor(self, rows: int, columns: int) -> float:
        if self.adjust == "match_rms_adamw":
            return 0.2 * sqrt(max(rows, columns))
        return sqrt(max(1, rows / columns))


def orthonormalised(matrix: Tensor, steps: int) -> Tensor:
    """Returns U V^T approximately, where U S V^T is the matrix, as float32."""
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    # The Frobenius norm bounds the spectral norm, which must be at most 1.
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(torch.float32).contiguous()


class Muon(CompressedOptimizer):
    """Muon for hidden matrices and AdamW for other parameters, with compressed updates.

    `matrices(name, parameter)` returns whether Muon takes a parameter; by default those of
    `hidden_matrices`. The others take AdamW with `adamw_lr`, `betas` and `eps`. `adamw_lr` None
    means `lr`, which suits `adjust="match_rms_adamw"`; it is needed with "original". Given `params`
    have the rates of their groups. The other arguments are those of `AdamW`.
    """

    def __init__(
        self,
        model: DDP,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        compress: Compressor | str | Auto | Settings = "none",
        ns_steps: int = 5,
        adjust: AdjustRate = "match_rms_adamw",
        matrices: Predicate | None = None,
        adamw_lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        params: Groups = None,
        clip: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: "Unpack[Options]",
    ) -> None:
        check_model("Muon", model)
        names = trained_parameters(model)
        self._by_muon = _chosen(model, names, matrices)
        if params is None:
            if adamw_lr is None and adjust == "original" and len(self._by_muon) < len(names):
                raise ConfigError(
                    "Muon: adamw_lr must be set with adjust='original', whose learning rates do "
                    "not suit the parameters that AdamW takes"
                )
            muon = [p for p, name in names.items() if name in self._by_muon]
            adamw = [p for p, name in names.items() if name not in self._by_muon]
            rate = lr if adamw_lr is None else adamw_lr
            both = ({"params": muon}, {"params": adamw, "lr": rate})
            params = [group for group in both if group["params"]]
        elif adamw_lr is not None:
            raise ConfigError("Muon: adamw_lr does not go with params; set lr in the groups")
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_steps": ns_steps, "adjust": adjust, "betas": betas, "eps": eps, "clip": clip,
        }  # fmt: skip
        exchange = Exchange(compress, process_group, scaler, options)
        CompressedOptimizer.__init__(self, model, params, defaults, exchange)

    def rule(self, group: Mapping[str, Any], name: str, parameter: Tensor) -> UpdateRule:
        if name not in self._by_muon:
            return adam_update_of("Muon", group, self._workers)
        check_at_least_zero("Muon", "clip", group["clip"])
        return MuonUpdate(
            group["momentum"],
            group["nesterov"],
            group["ns_steps"],
            group["adjust"],
            float(group["clip"]),
        )


def _chosen(
    model: DDP, names: Mapping[nn.Parameter, str], matrices: Predicate | None
) -> frozenset[str]:
    """Returns the names of the parameters that Muon takes."""
    if matrices is None:
        return frozenset(hidden_matrices(model.module) & {*names.values()})
    return chosen_matrices("Muon", {n: p for p, n in names.items()}, matrices)
