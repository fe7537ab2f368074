"""Casts to another floating-point format (definition: kernels/reference/cast.py).

One pass each: rounding with its residual, and the sum of up to eight messages.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.scatter import said
from gradwire.kernels.validation import check_out

BLOCK = 2048
TOGETHER = 8


@triton.jit
def _pack_kernel(
    x_ptr, residual_ptr, left_ptr, values_ptr, decay, numel, FEEDBACK: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    total = tl.load(x_ptr + place, mask=inside, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + place, mask=inside, other=0.0)
    value = said(total, values_ptr, HALF)
    tl.store(values_ptr + place, value, mask=inside)
    if FEEDBACK:
        tl.store(left_ptr + place, total - value.to(tl.float32), mask=inside)


@triton.jit
def _add_kernel(rows, out_ptr, weight, numel, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    total = tl.load(out_ptr + place, mask=inside, other=0.0)
    for row in tl.static_range(ROWS):
        value = tl.load(rows[row] + place, mask=inside, other=0.0).to(tl.float32)
        # As torch adds on the card: rounded once.
        total = tl.fma(value, weight, total)
    tl.store(out_ptr + place, total, mask=inside)


def _pack(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, dtype: torch.dtype
) -> Tensor:
    values = torch.empty(x.numel(), dtype=dtype, device=x.device)
    if x.numel():
        _pack_kernel[(-(-x.numel() // BLOCK),)](
            x, residual, residual_out, values, decay, x.numel(), FEEDBACK=residual_out is not x,
            HALF=dtype == torch.float16, BLOCK=BLOCK,
        )  # fmt: skip
    return values


def cast_pack(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else _pack(x, x, 1.0, x, dtype)


def cast_pack_sum(
    x: Tensor, residual: Tensor, decay: float, residual_out: Tensor, dtype: torch.dtype
) -> Tensor:
    return _pack(x, residual, decay, residual_out, dtype)


def cast_add(out: Tensor, rows: Sequence[Tensor], weight: float) -> None:
    check_out(out)
    for start in range(0, len(rows) if out.numel() else 0, TOGETHER):
        some = tuple(rows[start : start + TOGETHER])
        _add_kernel[(-(-out.numel() // BLOCK),)](
            some, out, weight, out.numel(), ROWS=len(some), BLOCK=BLOCK
        )
