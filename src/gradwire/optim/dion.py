"""Dion: orthonormalised updates of low rank, whose factors are all that workers exchange."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire import kernels
from gradwire.base import Compressor, MultiRound, Traits, UpdateRule, memoized
from gradwire.base.matrices import Predicate, chosen_matrices, hidden_matrices
from gradwire.checks import check_fraction_below_one
from gradwire.compressors._low_rank import (
    initial_factors,
    load_and_project,
    matrix_shape,
    update_factor,
    write_product,
)
from gradwire.compressors.none import NoCompression
from gradwire.compressors.powersgd import PowerSGD
from gradwire.engine.plan import Method
from gradwire.errors import ConfigError
from gradwire.integrations.ddp import trained_parameters
from gradwire.integrations.settings import Options
from gradwire.memory.residual import Residual
from gradwire.optim.adam_update import adam_update_of
from gradwire.optim.base import CompressedOptimizer, Exchange, Groups
from gradwire.optim.groups import check_at_least_zero, check_model
from gradwire.policies import Policies, Policy
from gradwire.spec import POLICY_DEFAULT, ExchangeConfig
from gradwire.types import EFInput, EncodeContext, Mean, Payload, Rounds, State

if TYPE_CHECKING:
    from typing_extensions import Unpack

MIN_NUMEL = 1024
"""Smaller matrices are AdamW's."""


@dataclass(frozen=True)
class DionFactors(MultiRound):
    """Sends the momentum B as P R with `rank` columns; the mean is the update P Q of unit columns.

    P is the mean of B Q for last step's Q, made orthonormal; R is the mean of B' P, and the new Q
    has its columns at length 1 (Ahn et al. 2025, arXiv:2504.05295). The factor sqrt(rows / columns)
    is part of the update. Of a worker's B stays B - (1 - momentum) P (B' P)': behind the memory
    `Residual` that is its momentum.
    """

    rank: int
    momentum: float = 0.95

    rounds_like: ClassVar = "mean"
    examples: ClassVar = ({"rank": 4},)
    family: ClassVar = "low rank"
    paper: ClassVar = "Ahn et al. 2025, arXiv:2504.05295"
    message: ClassVar = PowerSGD.message

    def __post_init__(self) -> None:
        PowerSGD(self.rank)
        check_fraction_below_one("dion", "momentum", self.momentum)

    @memoized
    def traits(self) -> Traits:
        return Traits(summable=True, contraction=True, propagates_nonfinite=True)

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        _, columns = matrix_shape(ctx.shape)
        [q] = initial_factors([columns], self.rank, ctx, device)
        return {"q": q / q.norm(dim=0)}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        m, p = load_and_project(ef, ctx, state["q"])  # [rows, columns], [rows, rank]
        ops = kernels.on(m.device)
        [(p,)] = yield Mean((p,))
        p = ops.orthonormal(p)
        own = ops.factor(m, p, True)
        if ef.residual_out is not None:
            ops.subtract_low_rank(m, p, own * (1 - self.momentum))
        [(r,)] = yield Mean((own,))  # [columns, rank]
        state["q"] = update_factor(state["q"], r / r.norm(dim=0))
        rows, columns = matrix_shape(ctx.shape)
        # Columns of zeros, as those of P then are, add nothing; NaN passes.
        unit = torch.where(r.norm(dim=0) == 0, r, r / r.norm(dim=0))
        return write_product(ef, ctx, p, unit * sqrt(rows / columns))

    def encode(self, x: Tensor, ctx: EncodeContext | None = None) -> Payload:
        return PowerSGD(self.rank).encode(x, ctx)

    def decode(self, payload: Payload) -> Tensor:
        """Returns the part of the momentum that the factors hold, not the update."""
        return PowerSGD(self.rank).decode(payload)

    def nbytes(self, shape: Sequence[int]) -> int:
        return PowerSGD(self.rank).nbytes(shape)


@dataclass(frozen=True)
class DionUpdate(UpdateRule):
    """The gradient itself: `DionFactors` and the residual behind it make the update of it."""

    clip: float = 0.0

    name: ClassVar = "dion"
    is_elementwise: ClassVar = False

    def __post_init__(self) -> None:
        check_at_least_zero("dion", "clip", self.clip)

    def state(self, numel: int, device: torch.device) -> State:
        return {}

    def update(self, grad: Tensor, state: State, pending: State) -> Tensor:
        return grad


class Dion(CompressedOptimizer):
    """Dion (Ahn et al. 2025, arXiv:2504.05295) of a DDP model: low-rank updates for matrices.

    Every worker keeps its own momentum B of each hidden matrix, and exchanges two factors of `rank`
    columns of it, from which all make one update with unit singular directions. Parameters that
    `matrices(name, parameter)` does not choose (by default those of `hidden_matrices`), small ones
    and those for which the factors would be no shorter take AdamW with `adamw_lr`, `betas` and
    `eps`; their updates are exchanged as they are. The other arguments are those of `AdamW`, but
    for `memory` and `exchange`, which are part of the method.
    """

    fixed_method = True

    def __init__(
        self,
        model: DDP,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        *,
        rank: int = 64,
        matrices: Predicate | None = None,
        adamw_lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        clip: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: "Unpack[Options]",
    ) -> None:
        for name in ("memory", "exchange"):
            if name in options:
                raise ConfigError(f"Dion: {name} is part of the method, leave it out")
        check_model("Dion", model)
        factors, names = DionFactors(rank, momentum), trained_parameters(model)
        self._by_dion = _taken(factors, model, names, matrices)
        first = [p for p, name in names.items() if name in self._by_dion]
        others = [p for p, name in names.items() if name not in self._by_dion]
        both = ({"params": first}, {"params": others, "lr": adamw_lr})
        groups: Groups = [group for group in both if group["params"]]
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "clip": clip
        }  # fmt: skip
        exchange = Exchange(_policies(factors, self._by_dion), process_group, scaler, options)
        CompressedOptimizer.__init__(self, model, groups, defaults, exchange)

    def rule(self, group: Mapping[str, Any], name: str, parameter: Tensor) -> UpdateRule:
        if name in self._by_dion:
            return DionUpdate(float(group["clip"]))
        return adam_update_of("Dion", group, self._workers)


def _taken(
    factors: DionFactors,
    model: DDP,
    names: Mapping[nn.Parameter, str],
    matrices: Predicate | None,
) -> list[str]:
    """Returns the names of the parameters that Dion takes, in the model's order."""
    if matrices is None:
        chosen = frozenset(hidden_matrices(model.module) & {*names.values()})
    else:
        chosen = chosen_matrices("Dion", {n: p for p, n in names.items()}, matrices)
    method = Method(factors, Residual(), ExchangeConfig("mean"))
    taken = [n for p, n in names.items() if n in chosen and method.compresses(p, MIN_NUMEL)]
    if not taken:
        raise ConfigError(
            f"Dion: rank {factors.rank} makes none of the {len(chosen)} chosen matrices shorter; "
            "lower it, or use gradwire.optim.Muon"
        )
    return taken


def _policies(factors: Compressor, names: Sequence[str]) -> Policies:
    """Returns the factors for some parameters, and no compression for all others."""
    mean = ExchangeConfig("mean")
    own = (Policy(name, factors, Residual(), mean) for name in names)
    return Policies((*own, Policy(POLICY_DEFAULT, NoCompression(), None, mean)))
