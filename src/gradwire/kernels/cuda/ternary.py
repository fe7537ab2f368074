"""Stochastic ternary quantization (definition: kernels/reference/ternary.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.random import KEYS, fraction, key_words, random_bits
from gradwire.kernels.reference.ternary import PER_BYTE
from gradwire.kernels.validation import check_out
from gradwire.types import Key

BLOCK = 2048
BYTES = 512
PROGRAMS = 1024
"""Programs per pass, at most. A program of the first pass yields one maximum and one sum."""
ADD_BYTES = 128
BATCH = 8
"""Messages added per pass over the output."""


@triton.jit
def _measure_kernel(
    x_ptr, largest_ptr, squares_ptr, numel, CLIP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # The bits of magnitudes sort like the magnitudes, with NaN above all.
    largest = tl.zeros((BLOCK,), tl.int32)
    squares = tl.zeros((BLOCK,), tl.float64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        index = start + tl.arange(0, BLOCK)
        magnitude = tl.abs(tl.load(x_ptr + index, mask=index < numel, other=0.0))
        largest = tl.maximum(largest, magnitude.to(tl.int32, bitcast=True))
        if CLIP:
            squares += magnitude.to(tl.float64) * magnitude.to(tl.float64)
        start += tl.num_programs(0) * BLOCK
    tl.store(largest_ptr + tl.program_id(0), tl.max(largest))
    if CLIP:
        tl.store(squares_ptr + tl.program_id(0), tl.sum(squares))


@triton.jit
def _scale(
    largest_ptr, squares_ptr, numel, clip, programs, CLIP: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    row = tl.arange(0, PROGRAMS)
    bits = tl.max(tl.load(largest_ptr + row, mask=row < programs, other=0))
    scale = bits.to(tl.float32, bitcast=True)
    if CLIP:
        squares = tl.sum(tl.load(squares_ptr + row, mask=row < programs, other=0.0))
        bound = (clip * tl.sqrt(squares / (tl.full((), 1.0, tl.float64) * numel))).to(tl.float32)
        # A scale that is not finite is sent as it is.
        scale = tl.where(bits < 0x7F800000, tl.minimum(bound, scale), scale)
    return scale


@triton.jit(do_not_specialize=["clip", "programs", *KEYS])
def _pack_kernel(
    x_ptr, packed_ptr, scale_ptr, largest_ptr, squares_ptr, numel, clip, programs,
    key_low, key_high, CLIP: tl.constexpr, PROGRAMS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    scale = _scale(largest_ptr, squares_ptr, numel, clip, programs, CLIP, PROGRAMS)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    rescale = tl.where(scale < 2.0**-64, 2.0**64, 1.0)
    # With an infinite scale all digits are zero.
    unit = tl.where(scale < float("inf"), scale * rescale, float("inf"))
    first = tl.program_id(0).to(tl.int64) * BYTES
    while first * 5 < numel:
        byte = first + tl.arange(0, BYTES)
        packed = tl.zeros((BYTES,), tl.int32)
        for column in tl.static_range(5):
            index = byte * 5 + (4 - column)
            x = tl.load(x_ptr + index, mask=index < numel, other=0.0)
            uniform = fraction(random_bits(index, key_low, key_high))
            nonzero = uniform * unit < tl.abs(x) * rescale
            digit = 1 + tl.where(nonzero, (x > 0).to(tl.int32) - (x < 0).to(tl.int32), 0)
            packed = packed * 3 + digit
        tl.store(packed_ptr + byte, packed.to(tl.uint8), mask=byte * 5 < numel)
        first += tl.num_programs(0) * BYTES


@triton.jit
def _next_digit(share):
    """Returns the first base-3 digit of a fraction, minus 1, as float32; and the rest."""
    product = share.to(tl.uint64) * 3
    # The digit becomes the lowest bits of 2^23.
    bits = (product >> 32).to(tl.uint32) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388609.0, product.to(tl.uint32)


@triton.jit(do_not_specialize=["row_bytes", "row_scales"])
def _add_kernel(
    out_ptr, packed_ptr, scales_ptr, row_bytes, row_scales, weight, numel,
    MESSAGES: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Adds messages; a thread handles the five entries of a byte, so a byte is decoded once."""
    start = tl.program_id(0).to(tl.int64) * BYTES
    byte = tl.arange(0, BYTES)
    ptr = out_ptr + start * 5 + byte * 5
    rest = numel - start * 5 - byte * 5
    a = tl.load(ptr, mask=rest > 0, other=0.0)
    b = tl.load(ptr + 1, mask=rest > 1, other=0.0)
    c = tl.load(ptr + 2, mask=rest > 2, other=0.0)
    d = tl.load(ptr + 3, mask=rest > 3, other=0.0)
    e = tl.load(ptr + 4, mask=rest > 4, other=0.0)
    for message in tl.static_range(MESSAGES):
        packed = tl.load(packed_ptr + message * row_bytes + start + byte, mask=rest > 0, other=0)
        unit = tl.load(scales_ptr + message * row_scales) * weight
        # The byte divided by 243, rounded up, in units of 2^-32. Its digits are the entries in
        # reverse order. Zero times the unit, not zero, so that a NaN scale reaches the output.
        share = packed.to(tl.uint32) * 17674763
        digit, share = _next_digit(share)
        e += digit * unit
        digit, share = _next_digit(share)
        d += digit * unit
        digit, share = _next_digit(share)
        c += digit * unit
        digit, share = _next_digit(share)
        b += digit * unit
        digit, share = _next_digit(share)
        a += digit * unit
    tl.store(ptr, a, mask=rest > 0)
    tl.store(ptr + 1, b, mask=rest > 1)
    tl.store(ptr + 2, c, mask=rest > 2)
    tl.store(ptr + 3, d, mask=rest > 3)
    tl.store(ptr + 4, e, mask=rest > 4)


def trits_pack(x: Tensor, clip: float, key: Key) -> tuple[Tensor, Tensor]:
    numel = x.numel()
    nbytes = -(-numel // PER_BYTE)
    packed = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    if not numel:
        return packed, torch.zeros(1, device=x.device)
    scale = torch.empty(1, device=x.device)
    blocks, byte_blocks = -(-numel // BLOCK), -(-nbytes // BYTES)
    programs, packers = min(PROGRAMS, blocks), min(PROGRAMS, byte_blocks)
    largest = torch.empty(programs, dtype=torch.int32, device=x.device)
    squares = torch.empty(programs if clip else 0, dtype=torch.float64, device=x.device)
    _measure_kernel[(programs,)](x, largest, squares, numel, CLIP=clip > 0, BLOCK=BLOCK)
    _pack_kernel[(packers,)](
        x, packed, scale, largest, squares, numel, clip, programs,
        *key_words(key), CLIP=clip > 0, PROGRAMS=PROGRAMS, BYTES=BYTES, enable_fp_fusion=False,
    )  # fmt: skip
    return packed, scale


def trits_add(out: Tensor, packed: Tensor, scales: Tensor, weight: float) -> None:
    check_out(out)
    numel = out.numel()
    for start in range(0, len(packed) if numel else 0, BATCH):
        batch, units = packed[start : start + BATCH], scales[start : start + BATCH]
        _add_kernel[(-(-numel // (PER_BYTE * ADD_BYTES)),)](
            out, batch, units, batch.stride(0), units.stride(0), weight, numel,
            MESSAGES=len(batch), BYTES=ADD_BYTES,
        )  # fmt: skip
