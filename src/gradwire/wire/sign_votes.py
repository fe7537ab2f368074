"""Signs as votes: one bit an entry, and whether the voter has a say at all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.types import Field, Key, Layout, Parts
from gradwire.wire.bits import packed_numel
from gradwire.wire.layout import as_rows


def votes_layout(numel: int) -> Layout:
    return Layout((Field(torch.uint8, packed_numel(numel, 1)), Field(torch.float32, 1)))


def pack_votes(x: Tensor, key: Key) -> Parts:
    """A set bit for every negative entry; then 1, or 0 where all is zero, or NaN where any is bad.

    An entry that is zero beside others that are not tosses a coin that depends on the key.
    """
    return kernels.at(x).votes_pack(x, key)


def add_votes(out: Tensor, messages: Sequence[Parts], weight: float) -> None:
    """Adds `weight` times +1 or -1 for every vote: nothing for zeros, NaN for a bad tensor."""
    bits, says = (as_rows(parts) for parts in zip(*messages, strict=True))
    kernels.at(out).sign_add(out, bits, says, weight)
