"""Signs, one bit each, with the mean magnitude (the meaning: kernels/reference/sign.py)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.kernels.cpu.sides import sides_add
from laconic.kernels.cpu.sums import measure, settle
from laconic.kernels.door import check_out
from laconic.types import Given


def _scale(sums: NDArray[np.float64], numel: int) -> Tensor:
    total = (sums[:, 1] - sums[:, 0]).sum() / max(1, numel)
    return torch.tensor([total], dtype=torch.float32)


def sign_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    bits, sums = measure(Given(x), max(1, x.numel()), even=True)
    return bits, _scale(sums, x.numel())


def sign_pack_sum(x: Tensor, residual: Tensor, decay: float, left: Tensor) -> tuple[Tensor, Tensor]:
    bucket = max(1, x.numel())
    bits, sums = measure(Given(x, residual, left, decay), bucket, even=True)
    scale = _scale(sums, x.numel())
    settle(left, -scale, scale, bucket)
    return bits, scale


def sign_add(out: Tensor, bits: Tensor, scales: Tensor, weight: float) -> None:
    check_out(out)
    sides_add(out, bits, -scales, scales, weight, max(1, out.numel()))
