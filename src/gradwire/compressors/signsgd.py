"""SignSGD: one bit per entry, and a majority vote."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.base import OneRound, Traits, memoized
from gradwire.types import EncodeContext, Layout, Parts
from gradwire.wire.sign_votes import add_votes, pack_votes, votes_layout


@dataclass(frozen=True)
class SignSGD(OneRound):
    """Sends the signs as votes; the gradient becomes +1 or -1 by majority, 0 where it is a tie.

    Every entry moves by the learning rate, so that should be small. All votes weigh the same,
    however large the gradient of a rank: symmetric noise and a lying minority are outvoted. A
    tensor of zeros does not vote. A single zero has no sign: it sends a random one, drawn per rank
    and step, so that such entries do not drift. A tensor with NaN or infinity decodes to NaN, which
    a majority counts as no vote.
    """

    examples: ClassVar = ({},)
    family: ClassVar = "quantisation"
    paper: ClassVar = "Bernstein et al. 2018, arXiv:1802.04434"
    message: ClassVar = "n bits (1 = negative), float32 weight of the vote: 1, 0 or NaN"

    @memoized
    def traits(self) -> Traits:
        why_not = "signs without a scale are as large for a small gradient as for a large one"
        return Traits(
            is_vote=True, suits_small_tensors=True, why_not=why_not, propagates_nonfinite=True
        )

    @memoized
    def layout(self, numel: int) -> Layout:
        return votes_layout(numel)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        return pack_votes(x, ctx.own_key())

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        add_votes(out, messages, weight)
