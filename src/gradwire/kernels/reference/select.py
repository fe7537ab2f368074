"""Selection by magnitude: the k largest, or all above a threshold, as ascending positions.

The input is `ef.total()`, the gradient plus the residual, which `ef.residual_out` holds afterwards.
"""

import torch
from torch import Tensor

from gradwire.types import EFInput


def magnitude_bits(x: Tensor) -> Tensor:
    """Returns the bits of |x| as integers, which sort as the magnitudes do; NaN is the largest."""
    return x.view(torch.int32) & 0x7FFFFFFF


def select_largest(ef: EFInput, count: int) -> Tensor:
    """Returns the positions of the `count` largest magnitudes; of equal ones, the first."""
    x = ef.total()
    if count == 0 or count >= x.numel():
        return torch.arange(min(count, x.numel()), device=x.device)
    size = magnitude_bits(x)
    threshold = size.topk(count, sorted=False).values.min()
    above, equal = size > threshold, size == threshold
    selected = above | (equal & (equal.cumsum(0) <= count - above.sum()))
    return torch.nonzero_static(selected, size=count).view(-1)


def select_above(ef: EFInput, threshold: Tensor) -> Tensor:
    """Returns the positions of magnitudes >= `threshold` (one float32); never zeros, always NaN."""
    x = ef.total()
    # Written so that NaN is selected.
    return torch.nonzero((x != 0) & ~(x.abs() < threshold)).view(-1)
