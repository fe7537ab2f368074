"""Chunked cosine transform: the few coefficients of every chunk that hold most of its norm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.base import OneRound, Traits, memoized
from gradwire.checks import check_whole
from gradwire.errors import ConfigError
from gradwire.types import EncodeContext, Field, Layout, Parts
from gradwire.wire.bits import pack_bits, packed_numel, unpack_bits


@dataclass(frozen=True)
class DCT(OneRound):
    """Sends the `k` largest cosine coefficients of every `chunk` entries, as positions and bf16.

    Where adjacent entries of a gradient are similar, its cosine transform (DCT-II, orthonormal) has
    few large coefficients. Those that are sent hold at least k/chunk of the squared norm, and the
    transform keeps norms, so the squared error is at most 1 - k/chunk of it (and a little for bf16)
    as for top-k; a chunk of k frequencies is exact but for bf16. A position costs log2(chunk) bits.
    The last chunk is padded with zeros. NaN or infinity makes its chunk non-finite.
    """

    chunk: int = 64
    k: int = 1

    examples: ClassVar = ({"chunk": 64, "k": 1}, {"chunk": 256, "k": 16})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Peng, Quesnelle & Kingma 2024, arXiv:2411.19870"
    message: ClassVar = "k positions of log2(chunk) bits per chunk, ascending; bf16 coefficients"

    def __post_init__(self) -> None:
        check_whole("dct", "chunk", self.chunk, 2, 4096)
        # Then every bit pattern is a valid position: no message can point outside its chunk.
        if self.chunk & (self.chunk - 1):
            raise ConfigError(f"dct: chunk must be a power of 2, got {self.chunk}")
        check_whole("dct", "k", self.k, 1, self.chunk)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True, block=self.chunk)

    @memoized
    def layout(self, numel: int) -> Layout:
        count = self.k * -(-numel // self.chunk)
        places = Field(torch.uint8, packed_numel(count, self._width()))
        return Layout((places, Field(torch.bfloat16, count)))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        chunks = pad(x, (0, -x.numel() % self.chunk)).view(-1, self.chunk)
        waves = chunks @ cosines(self.chunk, x.device).T
        place = waves.abs().topk(self.k, dim=1).indices.sort(dim=1).values
        values = waves.gather(1, place).to(torch.bfloat16)
        return pack_bits(place.view(-1), self._width()), values.view(-1)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        waves = out.new_zeros(-(-out.numel() // self.chunk), self.chunk)
        for places, values in messages:
            place = unpack_bits(places, self._width(), values.numel())
            weighted = values.to(out.dtype) * weight
            waves.scatter_add_(1, place.view(-1, self.k), weighted.view(-1, self.k))
        out.add_((waves @ cosines(self.chunk, out.device)).view(-1)[: out.numel()])

    def _width(self) -> int:
        return self.chunk.bit_length() - 1


@cache
def cosines(size: int, device: torch.device) -> Tensor:
    """Returns the orthonormal DCT-II as a matrix: row f is the cosine of f half periods."""
    frequency = torch.arange(size, dtype=torch.float64).unsqueeze(1)
    middle = torch.arange(size, dtype=torch.float64) + 0.5
    waves = torch.cos(math.pi / size * frequency * middle) * math.sqrt(2 / size)
    waves[0] *= math.sqrt(0.5)
    return waves.to(torch.float32).to(device)
