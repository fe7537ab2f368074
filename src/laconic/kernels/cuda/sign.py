"""Signs, one bit each, with the mean magnitude (the meaning: kernels/reference/sign.py)."""

import torch
from torch import Tensor

from laconic.kernels.cuda.sides import sides_add
from laconic.kernels.cuda.sums import measure, settle


def sign_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    bits, sums = measure(x, x, 0.0, x, feedback=False)
    if not x.numel():
        return bits, torch.zeros(1, device=x.device)
    return bits, settle(x, sums, feedback=False, even=True)[1]


def sign_pack_sum(x: Tensor, residual: Tensor, decay: float, left: Tensor) -> tuple[Tensor, Tensor]:
    bits, sums = measure(x, residual, decay, left, feedback=True)
    if not x.numel():
        return bits, torch.zeros(1, device=x.device)
    return bits, settle(left, sums, feedback=True, even=True)[1]


def sign_add(out: Tensor, bits: Tensor, scales: Tensor, weight: float) -> None:
    sides_add(out, bits, -scales, scales, weight, max(1, out.numel()))
