"""Stochastic ternary quantization: -1, 0 or 1, five values per byte, with one scale."""

import math

import torch
from torch import Tensor

from gradwire.kernels.reference.random import uniform
from gradwire.types import Key

PER_BYTE = 5


def trits_pack(x: Tensor, clip: float, key: Key) -> tuple[Tensor, Tensor]:
    """Returns packed trits, the sign of an entry with probability |entry|/scale, and the scale.

    The scale is the largest magnitude or, with `clip` above 0, at most `clip` times the root mean
    square. If the scale is not finite, all trits are zero.
    """
    scale = _scale(x, clip)
    # For subnormal scales, a fraction of the scale would be rounded to the scale itself.
    rescale = torch.where(scale < 2.0**-64, 2.0**64, 1.0)
    nonzero = uniform(key, x.numel(), x.device) * (scale * rescale) < x.abs() * rescale
    nonzero &= scale.isfinite()
    return pack_trits(nonzero * x.sign().nan_to_num_(0.0)), scale


def trits_add(out: Tensor, packed: Tensor, scales: Tensor, weight: float) -> None:
    """Adds `weight * scales[i]` (one per row) times the trits of every row, in order."""
    for row, scale in zip(packed, scales * weight, strict=True):
        out.add_(unpack_trits(row, out.numel()).to(out.dtype) * scale)


def pack_trits(trits: Tensor) -> Tensor:
    """Packs numbers of {-1, 0, 1}: each plus one is a base-3 digit, the first is the lowest.

    The last byte is padded with zeros.
    """
    padded = -(-trits.numel() // PER_BYTE) * PER_BYTE
    digits = torch.ones(padded, dtype=torch.uint8, device=trits.device)
    digits[: trits.numel()] = trits + 1
    columns = digits.view(-1, PER_BYTE).unbind(1)
    packed = columns[-1]
    for column in reversed(columns[:-1]):
        packed = packed * 3 + column
    return packed


def unpack_trits(packed: Tensor, count: int) -> Tensor:
    """Unpacks the first `count` trits, as int8; every byte value decodes to five of them."""
    rest = packed
    digits = torch.empty(packed.numel(), PER_BYTE, dtype=torch.int8, device=packed.device)
    for column in range(PER_BYTE):
        digits[:, column] = rest % 3
        rest = rest // 3
    return digits.view(-1)[:count] - 1


def _scale(x: Tensor, clip: float) -> Tensor:
    if not x.numel():
        return x.new_zeros(1)
    largest = x.abs().amax().view(1)
    if not clip:
        return largest
    # Squares of large or small gradients leave the range of float32.
    mean_square = x.norm(dtype=torch.float64) / math.sqrt(x.numel())
    return torch.minimum(largest, clip * mean_square).to(x.dtype)
