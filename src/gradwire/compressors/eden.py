"""EDEN, and DRIVE as its one-bit case: a random rotation makes every gradient look normal."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gradwire.base import OneRound, Traits
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
"""The levels by bits that round a standard normal number with the least squared error."""

SMALLEST = 64
"""The entries that are left over are rotated this many at a time, filled up with zeros."""


@dataclass(frozen=True)
class Eden(OneRound):
    """Sends blocks in a random basis, `bits` a coordinate, and one scale a block.

    Random signs and Hadamard transforms (twice; all ranks draw alike, so a mean is rotated back
    once) turn x into Rx, whose coordinates look normal; they go to the nearest levels Q for normal
    numbers. The scale |x|²/<Rx,Q> makes it unbiased: exactly for a uniform rotation, for this one
    as far as we can measure, unless one entry outweighs the rest of its block by more than `block`
    times (then off by about |x|/√block). Squared error: 0.57, 0.13, 0.036, 0.0096 of |x|² for 1 to
    4 bits. `scale=closest`, <Rx,Q>/|Q|², is biased, closer, and always a contraction. One bit is
    DRIVE. NaN or infinity makes its block NaN.
    """

    bits: int = 1
    block: int = 4096
    scale: Literal["unbiased", "closest"] = "unbiased"

    examples: ClassVar = ({}, {"bits": 4}, {"bits": 1, "block": 256, "scale": "closest"})
    family: ClassVar = "quantisation"
    paper: ClassVar = "Vargaftik et al. 2022, arXiv:2108.08842"

    def __post_init__(self) -> None:
        check_whole("eden", "bits", self.bits, 1, 4)
        check_whole("eden", "block", self.block, SMALLEST)
        if self.block & (self.block - 1):
            raise ConfigError(f"eden: block must be a power of two, got {self.block}")
        if self.scale not in ("unbiased", "closest"):
            raise ConfigError(f"eden: scale must be 'unbiased' or 'closest', got {self.scale!r}")

    def traits(self) -> Traits:
        return Traits(
            step_dependent=True,
            unbiased=self.scale == "unbiased",
            contraction=self.scale == "closest",
            why_not="scale=unbiased says more than is there, with no bound below 1 on the error "
            "(use scale=closest)",
            propagates_nonfinite=True,
        )

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
        # Entries are divided by the largest, lest sums and squares leave the range of float32.
        unit = rows.abs().amax(dim=1, keepdim=True)
        z = rotate(torch.where(unit > 0, rows / unit, 0.0), coins)
        norm = z.norm(dim=1, keepdim=True, dtype=torch.float64)
        levels = levels_of(self.bits, rows.device)
        normal = (z * (rows.shape[1] ** 0.5 / norm)).to(z.dtype)
        code = torch.bucketize(normal, (levels[1:] + levels[:-1]) / 2)
        said = levels[code].double()
        dot = (z * said).sum(dim=1)
        unbiased = self.scale == "unbiased"
        scale = norm.view(-1).square() / dot if unbiased else dot / said.square().sum(dim=1)
        return code, (torch.where(dot > 0, scale, 0.0) * unit.view(-1)).to(rows.dtype)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        shapes = pieces(out.numel(), self.block)
        said = out.new_zeros(sum(p.rows * p.width for p in shapes))
        levels = levels_of(self.bits, out.device)
        for packed, scales in messages:
            codes = unpack_bits(packed, self.bits, said.numel())
            each = scales.split([p.rows for p in shapes])
            for p, scale in zip(shapes, each, strict=True):
                p.of(said).add_(levels[p.of(codes)] * scale.unsqueeze(1))
        coins = flips(said.numel(), ctx, out.device)
        for p in shapes:
            p.of(said).copy_(rotate(p.of(said), p.of(coins)))
        out.add_(said[: out.numel()], alpha=weight)


class Piece(NamedTuple):
    """Blocks of one width that lie side by side."""

    start: int
    rows: int
    width: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.rows * self.width].view(self.rows, self.width)


def pieces(numel: int, block: int) -> list[Piece]:
    """As many whole blocks as there are, then halves of halves; only the last may be filled up."""
    found: list[Piece] = []
    start, width = 0, block
    while start < numel:
        while width > SMALLEST and width > numel - start:
            width //= 2
        found.append(Piece(start, max(1, (numel - start) // width), width))
        start += found[-1].rows * width
    return found


@cache
def levels_of(bits: int, device: torch.device) -> Tensor:
    """Kept on the device: a copy from the host cannot be part of a CUDA graph."""
    half = POSITIVE[bits]
    return torch.tensor([*(-v for v in reversed(half)), *half]).to(device, non_blocking=True)


def flips(count: int, ctx: EncodeContext, device: torch.device) -> Tensor:
    """Random bits, alike on all ranks; others for what ranks from `size` on encode again.

    A mean of decoded messages is not independent of their rotation.
    """
    return random_bits(ctx.shared_random(1 + (ctx.rank >= ctx.world_size)), count, device)


def rotate(rows: Tensor, coins: Tensor) -> Tensor:
    """Each row in the basis that its coins choose; twice, and it is back.

    With one transform a large entry would decide all signs, and the others were never heard of.
    """
    first, second = 1 - 2 * (coins & 1), 1 - 2 * ((coins >> 16) & 1)
    return hadamard(hadamard(rows * first) * second) * first


def hadamard(rows: Tensor) -> Tensor:
    """Each row times the orthonormal Hadamard matrix, which is its own inverse."""
    count, width = rows.shape
    rows = rows * width**-0.5
    for step in range(width.bit_length() - 1):
        one, two = rows.view(count, -1, 2, 1 << step).unbind(2)
        rows = torch.stack((one + two, one - two), dim=2)
    return rows.view(count, width)
