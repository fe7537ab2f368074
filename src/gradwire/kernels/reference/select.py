"""Selection by magnitude: the k largest, or all above a threshold, as ascending positions.

The input is `given.total()`, the gradient plus the residual, which `given.residual_out` holds afterwards.
"""

import torch
from torch import Tensor

from gradwire.types import EFInput


def magnitude_bits(x: Tensor) -> Tensor:
    """The bits of |x| as integers, which sort as the magnitudes do, with NaN above infinity."""
    return x.view(torch.int32) & 0x7FFFFFFF


def largest(given: EFInput, count: int) -> Tensor:
    """Positions of the `count` largest magnitudes; of equal ones the first win."""
    x = given.total()
    if count == 0 or count >= x.numel():
        return torch.arange(min(count, x.numel()), device=x.device)
    size = magnitude_bits(x)
    border = size.topk(count, sorted=False).values.min()
    above, equal = size > border, size == border
    kept = above | (equal & (equal.cumsum(0) <= count - above.sum()))
    return torch.nonzero_static(kept, size=count).view(-1)


def reaching(given: EFInput, border: Tensor) -> Tensor:
    """Positions of all magnitudes from `border` (one float32) on; never of zeros, always of NaN."""
    x = given.total()
    # Written so that NaN is chosen.
    return torch.nonzero((x != 0) & ~(x.abs() < border)).view(-1)
