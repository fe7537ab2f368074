"""Variance-based sparsification: an entry is sent once its sum exceeds its own noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import MultiRound, Traits, check_payload, flat32, memoized
from gradwire.compressors._sparsifier import (
    count_for_ratio,
    fixed_layout,
    variable_layout,
)
from gradwire.errors import ConfigError
from gradwire.types import AllGather, EFInput, EncodeContext, Layout, Parts, Payload, Rounds, State
from gradwire.wire.indices import pack_index, unpack_index
from gradwire.wire.layout import packed_bytes

TYPICAL_RATIO = 0.03
"""Share of independent normal entries that a step sends with the default setting (about)."""


@dataclass(frozen=True)
class Variance(MultiRound):
    """Sends the entries whose sum r since they were last sent has r² > alpha v; v is its variance.

    v adds up squared gradients and decays by `zeta` per step, so a persistent gradient is sent
    after about `alpha` steps and noise is held back. The paper squares the gradients of single
    examples. A step has one gradient per entry, and r² = v at first carries no information: hence
    each square is mixed with `shrink` of the tensor's mean square, and an entry far above that mean
    is sent at once. |r|² <= alpha v sums to a residual of at most alpha/(1 - zeta) times the
    largest squared gradient norm, as a contraction by 2 √((1 - zeta)/alpha) has. Without that
    residual it would send nothing. Zeros are never sent, NaN and infinity always; v keeps neither.
    """

    alpha: float = 1.5
    zeta: float = 0.999
    shrink: float = 0.5

    rounds_like: ClassVar = "gather"
    loss_scaled_keys: ClassVar = ("spread",)
    unsent_keys: ClassVar = ("spread",)
    examples: ClassVar = ({}, {"alpha": 2.0, "zeta": 0.99, "shrink": 0.75})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Tsuzuku, Imachi & Akiba 2018, arXiv:1802.06058"
    message: ClassVar = "count as int32, positions, bf16 values"

    def __post_init__(self) -> None:
        if not 1 <= self.alpha < float("inf"):
            raise ConfigError(f"variance: alpha must be at least 1, got {self.alpha!r}")
        if not 0 < self.zeta < 1:
            raise ConfigError(f"variance: zeta must be in (0, 1), got {self.zeta!r}")
        if not 0 <= self.shrink <= 1:
            raise ConfigError(f"variance: shrink must be in [0, 1], got {self.shrink!r}")

    @memoized
    def traits(self) -> Traits:
        return Traits(accumulates=True, variable_length=True, propagates_nonfinite=True)

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        """Returns the root of v, since v itself could leave the range of float32."""
        return {"spread": torch.zeros(ctx.numel, device=device)}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        spread = self._spread(ef.grad, state["spread"])
        total = ef.total()
        index = self._select(total, spread)
        parts = _parts(total, index)
        if ef.residual_out is not None:
            _add(ef.residual_out, parts, -1.0)
        layout = self.layout(ctx.numel)
        messages = yield AllGather(parts, layout, [layout] * ctx.world_size)
        spread = torch.where(spread.isfinite(), spread, state["spread"])
        state["spread"] = spread.mul_(self.zeta**0.5).index_fill_(0, index, 0.0)
        out = ef.grad.zero_()
        for message in messages:
            _add(out, message, 1 / ctx.world_size)
        return out

    def _spread(self, x: Tensor, before: Tensor) -> Tensor:
        if not x.numel():
            return before
        clean = x.nan_to_num(0.0, 0.0, 0.0)
        typical = (clean.norm(dtype=torch.float64) / x.numel() ** 0.5).to(x.dtype)
        now = torch.hypot(x * (1 - self.shrink) ** 0.5, typical * self.shrink**0.5)
        return torch.hypot(before, now)

    def _select(self, total: Tensor, spread: Tensor) -> Tensor:
        significant = (total / self.alpha**0.5).abs() > spread
        return torch.nonzero(significant | ~total.isfinite()).view(-1)

    def encode(self, x: Tensor, ctx: EncodeContext | None = None) -> Payload:
        x, ctx = flat32(x), ctx or EncodeContext(tuple(x.shape))
        spread = self._spread(x, self.state(ctx, x.device)["spread"])
        parts = _parts(x, self._select(x, spread))
        return Payload(parts, ctx, packed_bytes([parts], [self.layout(x.numel())]))

    def decode(self, payload: Payload) -> Tensor:
        check_payload(payload, lambda ctx: self.layout(ctx.numel))
        out = torch.zeros(payload.ctx.numel, device=payload.parts[0].device)
        _add(out, payload.parts, 1.0)
        return out.view(payload.ctx.shape)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Returns the length of a typical message."""
        numel = torch.Size(shape).numel()
        count = count_for_ratio(TYPICAL_RATIO, numel)
        return packed_bytes(None, [self.layout(numel), fixed_layout(torch.bfloat16, numel, count)])

    @memoized
    def layout(self, numel: int) -> Layout:
        """Returns the layout of a message: count, positions, values."""
        return variable_layout(torch.bfloat16, numel)


def _parts(x: Tensor, index: Tensor) -> Parts:
    count = torch.tensor([index.numel()], dtype=torch.int32, device=x.device)
    return count, pack_index(index, x.numel()), x[index].to(torch.bfloat16)


def _add(out: Tensor, parts: Parts, weight: float) -> None:
    """Adds `weight` times the decoded message to `out`."""
    _, positions, values = parts
    index = unpack_index(positions, out.numel(), values.numel())
    out.index_add_(0, index, values.to(out.dtype) * weight)
