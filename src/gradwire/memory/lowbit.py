"""Error feedback in 8 bits: the residual takes a quarter of the memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.base import Memory, weighted_sum
from gradwire.types import EFInput, State

BLOCK = 256
"""Number of entries that share one scale."""


@dataclass(frozen=True)
class LowBit(Memory):
    """Keeps the residual as int8 codes and one float32 scale per 256 entries: 1.016 bytes each.

    The scale is the block's largest magnitude / 127 and codes are rounded to the nearest, so the
    residual is off by half a scale at most. That rounding error is lost: it is in no residual, and
    an entry below 1/254 of its block's largest becomes zero. During a step there is a temporary
    residual in float32. A block that is not finite becomes zero, so that it does not stay so.
    """

    examples: ClassVar = ({},)
    needs_contraction: ClassVar = True
    loss_scaled_keys: ClassVar = ("scales",)
    separates_residual: ClassVar = True
    is_debt: ClassVar = True

    def state(self, numel: int, device: torch.device) -> State:
        return {
            "codes": torch.zeros(numel, dtype=torch.int8, device=device),
            "scales": torch.zeros(-(-numel // BLOCK), device=device),
        }

    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        residual = _decode(state["codes"], state["scales"])
        return EFInput(grad, residual, residual)

    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        assert ef.residual_out is not None
        pending["codes"], pending["scales"] = _encode(ef.residual_out)
        return mean

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        residuals = [_decode(s["codes"], s["scales"]) for s in states]
        codes, scales = _encode(weighted_sum(residuals, weights))
        return {"codes": codes, "scales": scales}

    def unsent(self, state: State) -> Tensor | None:
        return _decode(state["codes"], state["scales"])

    def rescale(self, state: State, factor: float) -> None:
        state["scales"].mul_(factor)


def _encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of flat `x`."""
    if not x.numel():
        return x.to(torch.int8), x.clone()
    blocks = pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1)
    scales = torch.where(largest.isfinite(), largest / 127, 0.0)
    codes = torch.where(scales[:, None] > 0, blocks / scales[:, None], 0.0)
    # Subnormal scales are inexact, so codes could leave their range.
    codes = codes.round_().clamp_(-127, 127).to(torch.int8)
    return codes.view(-1)[: x.numel()].clone(), scales


def _decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the decoded entries as float32."""
    return scales.repeat_interleave(BLOCK)[: codes.numel()].mul_(codes)
