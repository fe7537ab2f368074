"""DeMo: momentum stays on its worker, and its largest cosine coefficients are sent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.base import UpdateRule
from gradwire.checks import check_flag, check_whole
from gradwire.compressors._sparsifier import ValueFormat
from gradwire.compressors.chunktopk import ChunkTopK
from gradwire.compressors.dct import cosines
from gradwire.errors import ConfigError
from gradwire.integrations.settings import Options
from gradwire.memory.residual import Residual
from gradwire.optim.base import CompressedOptimizer, Exchange, Groups
from gradwire.optim.groups import check_at_least_zero
from gradwire.types import State

if TYPE_CHECKING:
    from typing_extensions import Unpack

MERGE = "gather:aggregate=coincident"
"""The mean of a coefficient is over the workers that sent it."""


@dataclass(frozen=True)
class DeMoUpdate(UpdateRule):
    """The cosine coefficients of a gradient, and back: the sign of what the mean ones make.

    A matrix, whose rows are the first dimension of a tensor, is cut into tiles, whose sides are the
    largest divisors of its own up to `side`; each has an orthonormal two-dimensional DCT-II. The
    coefficients of a tile follow each other. Vectors stay as they are, since they are sent whole.

    Behind it belong a memory `Residual(decay)`, which then holds the momentum in coefficients, and
    a sparsifier (Peng, Quesnelle & Kingma 2024, arXiv:2411.19870). Without `sign` parameters follow
    the momentum that was sent.
    """

    side: int = 64
    sign: bool = True
    clip: float = 0.0

    name: ClassVar = "demo"
    is_elementwise: ClassVar = False

    def __post_init__(self) -> None:
        check_whole("demo", "side", self.side, 1, 4096)
        check_flag("demo", "sign", self.sign)
        check_at_least_zero("demo", "clip", self.clip)

    def state(self, numel: int, device: torch.device) -> State:
        """Returns nothing: the memory behind this rule keeps the momentum."""
        return {}

    def update(self, grad: Tensor, state: State, pending: State) -> Tensor:
        if grad.dim() < 2 or not grad.numel():
            return grad
        tiles = self._tiles(grad.view(grad.shape[0], -1))
        rows, columns = (cosines(size, grad.device) for size in tiles.shape[-2:])
        return rows @ tiles @ columns.T

    def of_mean(self, mean: Tensor, state: State, pending: State) -> Tensor:
        if mean.dim() >= 2 and mean.numel():
            shape = mean.shape
            layout = self._tiles(mean.view(shape[0], -1)).shape
            rows, columns = (cosines(size, mean.device) for size in layout[-2:])
            tiles = rows.T @ mean.reshape(layout) @ columns
            mean = tiles.transpose(1, 2).reshape(shape)
        return mean.sign() if self.sign else mean

    def _tiles(self, matrix: Tensor) -> Tensor:
        """Returns the tiles: [bands, tiles of a band, rows, columns]."""
        height, width = (largest_divisor(size, self.side) for size in matrix.shape)
        cut = matrix.reshape(matrix.shape[0] // height, height, -1, width)
        return cut.transpose(1, 2).contiguous()


def largest_divisor(size: int, most: int) -> int:
    """Returns the largest divisor of `size` that is at most `most`."""
    return next(d for d in range(min(size, most), 0, -1) if size % d == 0)


class DeMo(CompressedOptimizer):
    """Decoupled momentum (Peng et al. 2024, arXiv:2411.19870) of a DDP model.

    A worker's momentum is `decay` times the old one plus its gradient. Of every `side`^2 of its
    cosine coefficients the `k` largest are sent, and subtracted from it; a coefficient's mean is
    over the workers that sent it. Parameters follow the sign of what the means transform back to,
    or that itself without `sign`. Small and one-dimensional tensors are sent whole, so that they
    follow the sign of the mean gradient. `values` is the number format of coefficients; what it
    rounds off stays in the momentum. The other arguments are those of `AdamW`, but for `memory` and
    `exchange`, which are part of the method.
    """

    fixed_method = True

    def __init__(
        self,
        model: DDP,
        lr: float | Tensor = 1e-3,
        decay: float = 0.999,
        weight_decay: float = 0.0,
        *,
        k: int = 32,
        side: int = 64,
        sign: bool = True,
        values: ValueFormat = "bf16",
        params: Groups = None,
        clip: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: "Unpack[Options]",
    ) -> None:
        for name in ("memory", "exchange"):
            if name in options:
                raise ConfigError(f"DeMo: {name} is part of the method, leave it out")
        self._rule = DeMoUpdate(side, sign)
        defaults = {"lr": lr, "weight_decay": weight_decay, "clip": clip}
        own = {"memory": Residual(decay), "exchange": MERGE}
        compressor = ChunkTopK(k, side * side, values)
        exchange = Exchange(compressor, process_group, scaler, {**options, **own})
        CompressedOptimizer.__init__(self, model, params, defaults, exchange)

    def rule(self, group: Mapping[str, Any], name: str, parameter: Tensor) -> UpdateRule:
        return DeMoUpdate(self._rule.side, self._rule.sign, float(group["clip"]))
