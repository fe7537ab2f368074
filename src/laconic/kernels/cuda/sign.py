"""Signs, one bit each, with the mean magnitude (the meaning: kernels/reference/sign.py).

The scale is a sum over the whole tensor, so a step with error feedback takes two passes: one that
adds, packs and sums, and one that subtracts what was said.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
WORD = 32


@triton.jit
def _pack_kernel(
    x_ptr, residual_ptr, left_ptr, words_ptr, sums_ptr, decay, numel,
    FEEDBACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = start + tl.arange(0, BLOCK)
    inside = place < numel
    total = tl.load(x_ptr + place, mask=inside, other=0.0)
    if FEEDBACK:
        total += decay * tl.load(residual_ptr + place, mask=inside, other=0.0)
        tl.store(left_ptr + place, total, mask=inside)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.abs(total)))
    bits = tl.reshape((total < 0).to(tl.int32), (BLOCK // 32, 32))
    words = tl.sum(bits << tl.arange(0, 32)[None, :], axis=1)
    at = start // 32 + tl.arange(0, BLOCK // 32)
    tl.store(words_ptr + at, words, mask=at * 32 < numel)


@triton.jit
def _add_kernel(
    out_ptr, bits_ptr, scales_ptr, row_bytes, numel, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    total = tl.load(out_ptr + place, mask=inside, other=0.0)
    for row in range(ROWS):
        scale = tl.load(scales_ptr + row)
        byte = tl.load(bits_ptr + row * row_bytes + place // 8, mask=inside, other=0)
        bit = (byte.to(tl.int32) >> (place % 8).to(tl.int32)) & 1
        total += tl.where(bit == 1, -scale, scale)
    tl.store(out_ptr + place, total, mask=inside)


def _pack(
    x: Tensor, residual: Tensor, decay: float, left: Tensor, feedback: bool
) -> tuple[Tensor, Tensor]:
    numel = x.numel()
    words = torch.empty(-(-numel // WORD), dtype=torch.int32, device=x.device)
    blocks = -(-numel // BLOCK)
    sums = torch.empty(blocks, device=x.device)
    if numel:
        _pack_kernel[(blocks,)](
            x, residual, left, words, sums, decay, numel, FEEDBACK=feedback, BLOCK=BLOCK
        )
    scale = (sums.sum(dtype=torch.float64) / max(1, numel)).to(torch.float32).view(1)
    return words.view(torch.uint8)[: -(-numel // 8)], scale


def sign_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    return _pack(x, x, 0.0, x, feedback=False)


def sign_pack_sum(x: Tensor, residual: Tensor, decay: float, left: Tensor) -> tuple[Tensor, Tensor]:
    bits, scale = _pack(x, residual, decay, left, feedback=True)
    sign_add(left, bits.unsqueeze(0), -scale)
    return bits, scale


def sign_add(out: Tensor, bits: Tensor, scales: Tensor) -> None:
    if out.numel():
        grid = (-(-out.numel() // BLOCK),)
        _add_kernel[grid](
            out, bits, scales, bits.stride(0), out.numel(), ROWS=bits.shape[0], BLOCK=BLOCK
        )
