"""Chosen entries: taken out of a tensor, and added to one (the meaning: kernels/reference)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.cuda.gathered import add_told
from laconic.kernels.door import check_out

BLOCK = 512


@triton.jit
def said(chosen, values_ptr, HALF: tl.constexpr):
    """Entries in the number format of a message."""
    value = chosen
    if HALF:
        # Finite entries beyond float16 become its largest number. Comparisons leave NaN alone.
        beyond = (tl.abs(chosen) > 65504.0) & (tl.abs(chosen) != float("inf"))
        value = tl.where(beyond, tl.where(chosen > 0, 65504.0, -65504.0), chosen)
    return value.to(values_ptr.dtype.element_ty)


@triton.jit
def _lift_kernel(left_ptr, index_ptr, values_ptr, count, HALF: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    place = tl.load(index_ptr + i, mask=inside, other=0)
    chosen = tl.load(left_ptr + place, mask=inside, other=0.0)
    value = said(chosen, values_ptr, HALF)
    tl.store(values_ptr + i, value, mask=inside)
    tl.store(left_ptr + place, chosen - value.to(tl.float32), mask=inside)


@triton.jit
def _add_kernel(
    out_ptr, index_ptr, rows_ptr, stride, count, weight, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    place = tl.load(index_ptr + i, mask=inside, other=0)
    total = tl.load(out_ptr + place, mask=inside, other=0.0)
    for row in range(ROWS):
        value = tl.load(rows_ptr + row * stride + i, mask=inside, other=0.0)
        total += value.to(tl.float32) * weight
    tl.store(out_ptr + place, total, mask=inside)


def lift(left: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    count = index.numel()
    values = torch.empty(count, dtype=dtype, device=left.device)
    if count:
        grid, half = -(-count // BLOCK), dtype == torch.float16
        _lift_kernel[(grid,)](left, index, values, count, HALF=half, BLOCK=BLOCK)
    return values


def add_at(out: Tensor, index: Tensor, rows: Tensor, weight: float) -> None:
    check_out(out)
    count = index.numel()
    if count:
        _add_kernel[(-(-count // BLOCK),)](
            out, index, rows, rows.stride(0), count, weight,
            ROWS=rows.shape[0], BLOCK=BLOCK,
            # A fused multiply-add rounds otherwise than the reference.
            enable_fp_fusion=False,
        )  # fmt: skip


def add_packed(
    out: Tensor, packed: Tensor, low: int, bitmap_bits: int, values: Tensor, weight: float
) -> None:
    add_told(out, packed.unbind(), values.unbind(), weight)
