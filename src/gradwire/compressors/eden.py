"""EDEN, and DRIVE as its one-bit case: a random rotation makes entries nearly normal."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gradwire.base import OneRound, Traits, memoized
from gradwire.checks import check_whole
from gradwire.errors import ConfigError
from gradwire.kernels.reference.random import random_bits
from gradwire.types import EncodeContext, Field, Layout, Parts
from gradwire.wire.bits import pack_bits, packed_numel, unpack_bits

POSITIVE = {
    1: (0.797885,),
    2: (0.45278, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.94234, 1.256231, 1.618046, 2.069017, 2.73259),
}
"""The levels, by bits, that quantise a standard normal number with the least squared error."""

SMALLEST = 64
"""Size of the blocks for the last entries, which are padded with zeros."""


@dataclass(frozen=True)
class Eden(OneRound):
    """Sends blocks in a random basis, `bits` per coordinate, and one scale per block.

    Random signs and Hadamard transforms (twice; all ranks draw the same, so a mean is rotated back
    once) turn x into Rx, whose coordinates are nearly normal; they are rounded to the nearest
    levels Q for normal numbers. The scale |x|²/<Rx,Q> makes it unbiased: exactly for a uniform
    rotation, for this one as far as we can measure, unless one entry outweighs the rest of its
    block by more than `block` times (then off by about |x|/√block). Squared error: 0.57, 0.13,
    0.036, 0.0096 of |x|² for 1 to 4 bits. `scale=closest`, <Rx,Q>/|Q|², is biased, closer, and
    always a contraction. One bit is DRIVE. NaN or infinity makes its block NaN.
    """

    bits: int = 1
    block: int = 4096
    scale: Literal["unbiased", "closest"] = "unbiased"

    examples: ClassVar = ({}, {"bits": 4}, {"bits": 1, "block": 256, "scale": "closest"})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Vargaftik et al. 2022, arXiv:2108.08842"
    message: ClassVar = "n codes of b bits, one float32 scale per block"

    def __post_init__(self) -> None:
        check_whole("eden", "bits", self.bits, 1, 4)
        check_whole("eden", "block", self.block, SMALLEST)
        if self.block & (self.block - 1):
            raise ConfigError(f"eden: block must be a power of two, got {self.block}")
        if self.scale not in ("unbiased", "closest"):
            raise ConfigError(f"eden: scale must be 'unbiased' or 'closest', got {self.scale!r}")

    @memoized
    def traits(self) -> Traits:
        return Traits(
            step_dependent=True,
            unbiased=self.scale == "unbiased",
            contraction=self.scale == "closest",
            why_not="scale=unbiased enlarges the message, with no bound below 1 on the error "
            "(use scale=closest)",
            propagates_nonfinite=True,
            block=self.block,
        )

    @memoized
    def layout(self, numel: int) -> Layout:
        shapes = pieces(numel, self.block)
        codes = packed_numel(sum(p.rows * p.width for p in shapes), self.bits)
        scales = sum(p.rows for p in shapes)
        return Layout((Field(torch.uint8, codes), Field(torch.float32, scales)))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        shapes = pieces(x.numel(), self.block)
        flat = x.new_zeros(sum(p.rows * p.width for p in shapes))
        flat[: x.numel()] = x
        coins = flips(flat.numel(), ctx, x.device)
        codes, scales = torch.empty_like(coins), [x.new_zeros(0)]
        for p in shapes:
            code, scale = self._quantise(p.of(flat), p.of(coins))
            p.of(codes).copy_(code)
            scales.append(scale)
        return pack_bits(codes, self.bits), torch.cat(scales)

    def _quantise(self, rows: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
        # Entries are divided by the largest, so that sums and squares stay in the range of float32.
        unit = rows.abs().amax(dim=1, keepdim=True)
        z = rotate(torch.where(unit > 0, rows / unit, 0.0), coins)
        norm = z.norm(dim=1, keepdim=True, dtype=torch.float64)
        levels = levels_of(self.bits, rows.device)
        normal = (z * (rows.shape[1] ** 0.5 / norm)).to(z.dtype)
        code = torch.bucketize(normal, boundaries_of(self.bits, rows.device))
        rounded = levels[code].double()
        dot = (z * rounded).sum(dim=1)
        unbiased = self.scale == "unbiased"
        scale = norm.view(-1).square() / dot if unbiased else dot / rounded.square().sum(dim=1)
        return code, (torch.where(dot > 0, scale, 0.0) * unit.view(-1)).to(rows.dtype)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        shapes = pieces(out.numel(), self.block)
        decoded = out.new_zeros(sum(p.rows * p.width for p in shapes))
        levels = levels_of(self.bits, out.device)
        for packed, scales in messages:
            codes = unpack_bits(packed, self.bits, decoded.numel())
            each = scales.split([p.rows for p in shapes])
            for p, scale in zip(shapes, each, strict=True):
                p.of(decoded).add_(levels[p.of(codes)] * scale.unsqueeze(1))
        coins = flips(decoded.numel(), ctx, out.device)
        for p in shapes:
            p.of(decoded).copy_(rotate(p.of(decoded), p.of(coins)))
        out.add_(decoded[: out.numel()], alpha=weight)


class Piece(NamedTuple):
    """Consecutive blocks of one width."""

    start: int
    rows: int
    width: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.rows * self.width].view(self.rows, self.width)


@lru_cache(maxsize=1024)
def pieces(numel: int, block: int) -> tuple[Piece, ...]:
    """Returns the whole blocks, then ever halved ones for the rest; only the last is padded."""
    found: list[Piece] = []
    start, width = 0, block
    while start < numel:
        while width > SMALLEST and width > numel - start:
            width //= 2
        found.append(Piece(start, max(1, (numel - start) // width), width))
        start += found[-1].rows * width
    return tuple(found)


@cache
def levels_of(bits: int, device: torch.device) -> Tensor:
    """Returns all levels, cached per device: a CUDA graph cannot copy them from the host."""
    half = POSITIVE[bits]
    return torch.tensor([*(-v for v in reversed(half)), *half]).to(device, non_blocking=True)


@cache
def boundaries_of(bits: int, device: torch.device) -> Tensor:
    """Returns the midpoints between levels, at which rounding to the nearest changes."""
    levels = levels_of(bits, device)
    return (levels[1:] + levels[:-1]) / 2


def flips(count: int, ctx: EncodeContext, device: torch.device) -> Tensor:
    """Returns random bits, equal on all ranks; others where a mean is encoded again.

    Contexts of ranks from `world_size` on encode means, which depend on the rotation of the
    messages that they are made of.
    """
    return random_bits(ctx.shared_random(1 + (ctx.rank >= ctx.world_size)), count, device)


def rotate(rows: Tensor, coins: Tensor) -> Tensor:
    """Rotates each row by the random signs in `coins`; applied twice it is the identity.

    With one transform only, a large entry would decide all signs, and the others would be lost.
    """
    first, second = 1 - 2 * (coins & 1), 1 - 2 * ((coins >> 16) & 1)
    return hadamard(hadamard(rows * first) * second) * first


def hadamard(rows: Tensor) -> Tensor:
    """Multiplies each row by the orthonormal Hadamard matrix, which is its own inverse."""
    count, width = rows.shape
    rows = rows * width**-0.5
    for step in range(width.bit_length() - 1):
        one, two = rows.view(count, -1, 2, 1 << step).unbind(2)
        rows = torch.stack((one + two, one - two), dim=2)
    return rows.view(count, width)
