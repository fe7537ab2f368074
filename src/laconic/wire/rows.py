"""The same part of many messages as the rows of one matrix, so that a kernel can read them all."""

from collections.abc import Sequence

import torch
from torch import Tensor


def as_rows(parts: Sequence[Tensor]) -> Tensor:
    """Flat parts of one length and type, one a row.

    A view where they lie at even distances, as messages that were gathered into one buffer do.
    """
    first = parts[0]
    distance = int(parts[min(1, len(parts) - 1)].storage_offset() - first.storage_offset())
    if first.is_contiguous() and distance >= 0 and _at_distance(parts, distance):
        return first.as_strided((len(parts), first.numel()), (distance, 1))
    return torch.stack(list(parts))


def _at_distance(parts: Sequence[Tensor], distance: int) -> bool:
    first = parts[0]
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != place:
            return False
        place += distance
    return True
