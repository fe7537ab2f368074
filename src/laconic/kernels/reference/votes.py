"""Signs as votes: zeros toss a coin."""

import torch
from torch import Tensor

from laconic.kernels.reference.bits import pack_bits
from laconic.kernels.reference.random import random_bits
from laconic.types import Key


def votes_pack(x: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    """A set bit for every negative entry; then 1, or 0 where all is zero, or NaN where any is bad.

    An entry that is zero has the bit of its place among the random words: bit i % 32 of word i/32.
    """
    nbytes = -(-x.numel() // 8)
    words = random_bits(key, -(-nbytes // 4), x.device)
    coins = words.to(torch.int32).view(torch.uint8)[:nbytes]
    return pack_bits(x < 0, 1) | (pack_bits(x == 0, 1) & coins), _say(x)


def _say(x: Tensor) -> Tensor:
    if not x.numel():
        return x.new_zeros(1)
    peak = x.abs().amax().view(1)
    return torch.where(peak.isfinite(), peak.sign(), torch.nan)
