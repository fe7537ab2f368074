"""Error feedback in 8 bits: what was not sent is kept in a quarter of the memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.base import Memory, weighted_sum
from gradwire.types import EFInput, State

BLOCK = 256
"""So many entries share one scale."""


@dataclass(frozen=True)
class LowBit(Memory):
    """Keeps x - said(x) as int8 codes and one float32 scale a block of 256: 1.016 bytes an entry.

    The scale is the block's largest magnitude / 127 and codes are rounded to the nearest, so what
    is kept is off by half a scale at most. That rounding error is nobody's residual: it is lost,
    and an entry below 1/254 of its block's largest is forgotten. During a step the residual is
    there in float32 for a while. A block that is not finite is forgotten, so as not to stay so.
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
        waiting = [_decode(s["codes"], s["scales"]) for s in states]
        codes, scales = _encode(weighted_sum(waiting, weights))
        return {"codes": codes, "scales": scales}

    def unsent(self, state: State) -> Tensor | None:
        return _decode(state["codes"], state["scales"])

    def rescale(self, state: State, factor: float) -> None:
        state["scales"].mul_(factor)


def _encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of flat `x`."""
    if not x.numel():
        return x.to(torch.int8), x.clone()
    blocks = pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1)
    scales = torch.where(largest.isfinite(), largest / 127, 0.0)
    codes = torch.where(scales[:, None] > 0, blocks / scales[:, None], 0.0)
    # Scales among the smallest floats are inexact, and codes could leave their range.
    codes = codes.round_().clamp_(-127, 127).to(torch.int8)
    return codes.view(-1)[: x.numel()].clone(), scales


def _decode(codes: Tensor, scales: Tensor) -> Tensor:
    """What codes and scales say, as float32."""
    return scales.repeat_interleave(BLOCK)[: codes.numel()].mul_(codes)
