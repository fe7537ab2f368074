"""Signs as votes: one bit an entry, and whether the voter has a say at all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic import kernels
from laconic.kernels.reference.random import random_bits
from laconic.types import Field, Layout, Parts
from laconic.wire.bits import packed_numel


def votes_layout(numel: int) -> Layout:
    return Layout((Field(torch.uint8, packed_numel(numel, 1)), Field(torch.float32, 1)))


def pack_votes(x: Tensor, key: int) -> Parts:
    """A set bit for every negative entry; then 1, or 0 where all is zero, or NaN where any is bad.

    An entry that is zero beside others that are not tosses a coin that depends on the key.
    """
    bits, _ = kernels.at(x).sign_pack(x)
    zeros, _ = kernels.at(x).sign_pack(-(x == 0).to(x.dtype))
    return bits | (zeros & _coins(key, bits.numel(), x.device)), _say(x)


def add_votes(out: Tensor, messages: Sequence[Parts], weight: float) -> None:
    """Adds `weight` times +1 or -1 for every vote: nothing for zeros, NaN for a bad tensor."""
    bits = torch.stack([bits for bits, _ in messages])
    says = torch.cat([say for _, say in messages]) * weight
    kernels.at(out).sign_add(out, bits, says)


def _say(x: Tensor) -> Tensor:
    if not x.numel():
        return x.new_zeros(1)
    low, high = x.aminmax()
    peak = torch.maximum(-low, high).view(1)
    return torch.where(peak.isfinite(), peak.sign(), torch.nan)


def _coins(key: int, nbytes: int, device: torch.device) -> Tensor:
    """Random bytes: 32 random bits are 32 coins, so this costs little beside the packing."""
    words = random_bits(key, -(-nbytes // 4), device)
    return words.to(torch.int32).view(torch.uint8)[:nbytes]
