"""Sign votes: one bit per entry, and the weight of the vote (0 for a zero gradient)."""

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
    """Packs the signs of `x`, and 1; or 0 if all entries are zero, NaN if any is non-finite.

    The bit of a zero entry is random and depends on the key.
    """
    return kernels.on(x.device).sign_votes_pack(x, key)


def add_votes(out: Tensor, messages: Sequence[Parts], weight: float) -> None:
    """Adds `weight` times +1 or -1 per vote: 0 for an all-zero tensor, NaN for a non-finite one."""
    bits, weights = (as_rows(parts) for parts in zip(*messages, strict=True))
    kernels.on(out.device).sign_add(out, bits, weights, weight)
