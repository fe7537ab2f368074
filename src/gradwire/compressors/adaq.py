"""Adaptive quantisation: the largest entries of either sign, each sent as the mean of its sign."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import OneRound, Traits, memoized
from gradwire.checks import check_positive_fraction
from gradwire.types import EncodeContext, Field, Layout, Parts
from gradwire.wire.bits import pack_bits, packed_numel, unpack_bits
from gradwire.wire.indices import check_index, index_field, pack_index, unpack_index


@dataclass(frozen=True)
class AdaQ(OneRound):
    """Sends the positions of the `ratio` largest entries of either sign, and one mean per sign.

    Of the k entries of a message, positives and negatives get their share of all entries, but at
    least one where there are any, so k is fixed and at least 2. Each costs its packed position and
    one sign bit. The squared norm of the message is removed from the error: a contraction, by 1/nk
    at least for n entries, and much more where the selected entries are similar. Zeros decode to
    zeros. NaN counts as the largest, and like infinity makes the mean of its sign non-finite.
    """

    ratio: float = 0.01

    examples: ClassVar = ({"ratio": 0.01}, {"ratio": 0.3})
    family: ClassVar = "hybrid"
    paper: ClassVar = "Dryden et al. 2016, MLHPC"
    message: ClassVar = "positions, k bits (1 = negative), float32 means of positives and negatives"

    def __post_init__(self) -> None:
        check_positive_fraction("adaq", "ratio", self.ratio)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True)

    @memoized
    def count(self, numel: int) -> int:
        """Returns how many entries are sent: at least two, so that either sign can have one."""
        return min(numel, max(2, round(self.ratio * numel)))

    @memoized
    def layout(self, numel: int) -> Layout:
        count = self.count(numel)
        signs = Field(torch.uint8, packed_numel(count, 1))

        def check(parts: Parts) -> None:
            check_index(parts[0], numel, count)

        return Layout((index_field(numel, count), signs, Field(torch.float32, 2)), check)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        numel, count = x.numel(), self.count(x.numel())
        below = _negative_count(x, count)
        highest = x.topk(count).indices
        # NaN counts as positive, so it is last here.
        lowest = (-x).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        lowest = lowest.topk(count).indices
        place = torch.arange(count, device=x.device)
        negative = place < below
        chosen = torch.where(negative, lowest, highest[(place - below).clamp(min=0)])
        index, by_place = chosen.sort()
        means = torch.stack([_mean(x[chosen], ~negative), _mean(x[chosen], negative)])
        signs = pack_bits(negative[by_place].long(), 1)
        return pack_index(index, numel), signs, means.to(x.dtype)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        numel, count = out.numel(), self.count(out.numel())
        for positions, signs, means in messages:
            index = unpack_index(positions, numel, count)
            values = (means * weight)[unpack_bits(signs, 1, count)]
            out.index_add_(0, index, values)


def _negative_count(x: Tensor, count: int) -> Tensor:
    """Returns how many of `count` entries are for the negatives: their share; each sign has one.

    Never more than there are of a sign, unless there are too few of both. Then one sign has all of
    its entries and the other has zeros too, so that no entry is selected for both.
    """
    negatives, positives = (x < 0).sum(), (~(x <= 0)).sum()
    others = negatives + positives
    spare = (count - others).clamp(min=0)
    share = ((count - spare) * negatives).double() / others.clamp(min=1)
    # Zeros that fill up a message lower the mean of their sign: they go to the lighter one.
    share = share.round().long() + torch.where(x.sum(dtype=torch.float64) < 0, 0, spare)
    low, high = (negatives > 0).long(), count - (positives > 0).long()
    return torch.minimum(torch.maximum(share, low), high)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean where the mask is set; in float64, since float32 sums may overflow."""
    total = torch.where(mask, values, 0.0).sum(dtype=torch.float64)
    return total / mask.sum().clamp(min=1)
