"""Stochastic ternary quantization: -1, 0 or 1, five values per byte, with one scale."""

import math

import torch
from torch import Tensor

from gradwire.kernels.reference.random import uniform
from gradwire.types import Key

PER_BYTE = 5


def trits_pack(x: Tensor, clip: float, key: Key) -> tuple[Tensor, Tensor]:
    """The sign of each entry with the chance |entry|/scale, else zero; and the scale.

    The scale is the largest magnitude or, with `clip` above 0, at most `clip` times the root mean
    square. Where the scale is not finite nothing is said but that.
    """
    scale = _scale(x, clip)
    # Among the smallest numbers a share of the scale would be rounded to the scale itself.
    lift = torch.where(scale < 2.0**-64, 2.0**64, 1.0)
    said = uniform(key, x.numel(), x.device) * (scale * lift) < x.abs() * lift
    said &= scale.isfinite()
    return pack_trits(said * x.sign().nan_to_num_(0.0)), scale


def trits_add(out: Tensor, packed: Tensor, scales: Tensor, weight: float) -> None:
    """Adds `weight * scales[i]` (one a row) times the trits of every row, in order."""
    for row, scale in zip(packed, scales * weight, strict=True):
        out.add_(unpack_trits(row, out.numel()).to(out.dtype) * scale)


def pack_trits(trits: Tensor) -> Tensor:
    """Numbers of {-1, 0, 1} as uint8: each plus one is a digit of base 3, the first the lowest.

    A last byte that is not full is filled with zeros.
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
    """The first `count` trits again, as int8; any byte is read as some five of them."""
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
