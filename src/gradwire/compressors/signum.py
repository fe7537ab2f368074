"""Signum: SignSGD on each rank's momentum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import MultiRound, Traits, check_payload, flat32, memoized
from gradwire.base.aggregation import aggregate
from gradwire.errors import ConfigError
from gradwire.types import AllGather, EFInput, EncodeContext, Layout, Payload, Rounds, State
from gradwire.wire.layout import packed_bytes
from gradwire.wire.sign_votes import add_votes, pack_votes, votes_layout


@dataclass(frozen=True)
class Signum(MultiRound):
    """Sends the signs of the momentum as votes; the gradient becomes +1, -1 or (a tie) 0.

    m = beta m + (1 - beta) x on each rank, m = x at first. The mean over past steps has less noise
    than one gradient, so its signs are more often right. Use an optimiser without momentum. Zeros
    vote as in SignSGD: a momentum of zeros not at all, single zeros at random. A rank whose
    gradient holds NaN or infinity does not vote, and its momentum is unchanged.
    """

    beta: float = 0.9

    loss_scaled_keys: ClassVar = ("momentum",)
    rounds_like: ClassVar = "gather"
    examples: ClassVar = ({}, {"beta": 0.99})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Bernstein et al. 2019, arXiv:1810.05291"
    message: ClassVar = "n bits (1 = negative), float32 weight of the vote: 1, 0 or NaN"

    def __post_init__(self) -> None:
        good = isinstance(self.beta, int | float) and not isinstance(self.beta, bool)
        if not good or not 0 <= self.beta < 1:
            raise ConfigError(f"signum: beta must be in [0, 1), got {self.beta!r}")

    @memoized
    def traits(self) -> Traits:
        why_not = "signs without a scale are as large for a small gradient as for a large one"
        return Traits(
            is_vote=True, suits_small_tensors=True, why_not=why_not, propagates_nonfinite=True
        )

    def state(self, ctx: EncodeContext, device: torch.device) -> State:
        begun = torch.zeros(1, device=device)
        return {"momentum": torch.zeros(ctx.numel, device=device), "begun": begun}

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        x = ef.total()
        past = state["begun"] * self.beta
        # A mean of two numbers stays in the range of float32, where their difference may not.
        momentum = past * state["momentum"] + (1 - past) * x
        parts = pack_votes(momentum, ctx.own_key())
        layout = self.layout(ctx.numel)
        if ef.residual_out is not None:
            add_votes(ef.residual_out, [parts], -1.0)
        good = parts[1].isfinite()
        state["momentum"] = torch.where(good, momentum, state["momentum"])
        state["begun"] = torch.where(good, 1.0, state["begun"])
        messages = yield AllGather(parts, layout, [layout] * ctx.world_size)
        # All votes have weight 1, so the sign of their sum is the majority; NaN's sign is 0.
        tally = ef.grad.zero_()
        add_votes(tally, [(bits, weight.sign()) for bits, weight in messages], 1.0)
        return tally.copy_(aggregate(tally.unsqueeze(0), "majority"))

    def encode(self, x: Tensor, ctx: EncodeContext | None = None) -> Payload:
        flat, ctx = flat32(x), ctx or EncodeContext(tuple(x.shape))
        parts = pack_votes(flat, ctx.own_key())
        return Payload(parts, ctx, self.nbytes(ctx.shape))

    def decode(self, payload: Payload) -> Tensor:
        check_payload(payload, lambda ctx: self.layout(ctx.numel))
        out = torch.zeros(payload.ctx.numel, device=payload.parts[0].device)
        add_votes(out, [payload.parts], 1.0)
        return out.view(payload.ctx.shape)

    def nbytes(self, shape: Sequence[int]) -> int:
        return packed_bytes(None, [self.layout(torch.Size(shape).numel())])

    @memoized
    def layout(self, numel: int) -> Layout:
        """Returns the layout of a message: signs, and the weight of the vote."""
        return votes_layout(numel)
