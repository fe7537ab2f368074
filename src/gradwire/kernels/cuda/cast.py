"""Casts to another floating-point format (definition: kernels/reference/cast.py).

One pass each: rounding with its residual, and the sum of up to eight messages.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.scatter import to_wire_dtype
from gradwire.kernels.validation import check_out

BLOCK = 2048
BATCH = 8


@triton.jit
def _pack_kernel(
    x_ptr, residual_ptr, residual_out_ptr, values_ptr, decay, numel, FEEDBACK: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    total = tl.load(x_ptr + index, mask=inside, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + index, mask=inside, other=0.0)
    value = to_wire_dtype(total, values_ptr, HALF)
    tl.store(values_ptr + index, value, mask=inside)
    if FEEDBACK:
        tl.store(residual_out_ptr + index, total - value.to(tl.float32), mask=inside)


@triton.jit
def _add_kernel(rows, out_ptr, weight, numel, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    total = tl.load(out_ptr + index, mask=inside, other=0.0)
    for row in tl.static_range(ROWS):
        value = tl.load(rows[row] + index, mask=inside, other=0.0).to(tl.float32)
        # Rounded once, like torch's addition on CUDA.
        total = tl.fma(value, weight, total)
    tl.store(out_ptr + index, total, mask=inside)


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
    for start in range(0, len(rows) if out.numel() else 0, BATCH):
        batch = tuple(rows[start : start + BATCH])
        _add_kernel[(-(-out.numel() // BLOCK),)](
            batch, out, weight, out.numel(), ROWS=len(batch), BLOCK=BLOCK
        )
