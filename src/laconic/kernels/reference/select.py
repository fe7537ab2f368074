"""The entries of largest magnitude."""

import torch
from torch import Tensor


def magnitude_bits(x: Tensor) -> Tensor:
    """The bits of |x| as integers, which sort as the magnitudes do, with NaN above infinity."""
    return x.view(torch.int32) & 0x7FFFFFFF


def largest(x: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest magnitudes, ascending; of equal ones the first win."""
    if count == 0 or count >= x.numel():
        return torch.arange(min(count, x.numel()), device=x.device)
    size = magnitude_bits(x)
    border = size.topk(count, sorted=False).values.min()
    above, equal = size > border, size == border
    kept = above | (equal & (equal.cumsum(0) <= count - above.sum()))
    return torch.nonzero_static(kept, size=count).view(-1)


def largest_sum(x: Tensor, residual: Tensor, decay: float, left: Tensor, count: int) -> Tensor:
    """`largest` of x + decay * residual, which `left` (maybe the residual) then holds."""
    return largest(torch.add(x, residual, alpha=decay, out=left), count)
