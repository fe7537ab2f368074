"""SignSGD: one bit an element, and the majority decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.base import OneRound, Traits
from gradwire.types import EncodeContext, Layout, Parts
from gradwire.wire.sign_votes import add_votes, pack_votes, votes_layout


@dataclass(frozen=True)
class SignSGD(OneRound):
    """Sends the signs as votes; the gradient becomes +1 or -1 by majority, 0 where it is a tie.

    Every entry moves by the learning rate, so that wants to be small. A rank's vote weighs the same
    however large its gradient: noise that is symmetric, and a minority that lies, are outvoted. A
    tensor of zeros says so and does not vote. A zero beside entries that are none has no sign to
    send: it draws one at random, anew on each rank and step, so such entries do not drift. A tensor
    with NaN or infinity decodes to NaN, which a majority counts as no vote.
    """

    examples: ClassVar = ({},)
    family: ClassVar = "quantisation"
    paper: ClassVar = "Bernstein et al. 2018, arXiv:1802.04434"

    def traits(self) -> Traits:
        why_not = "signs without a scale are as large for a small gradient as for a large one"
        return Traits(
            is_vote=True, suits_small_tensors=True, why_not=why_not, propagates_nonfinite=True
        )

    def layout(self, numel: int) -> Layout:
        return votes_layout(numel)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        return pack_votes(x, ctx.own_key())

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        add_votes(out, messages, weight)
