"""Chunked top-k: the largest entries of every chunk, so that every part of a tensor is sent."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Traits, memoized
from gradwire.checks import check_whole
from gradwire.compressors._sparsifier import Sparsifier, ValueFormat, check_format, count_for_ratio
from gradwire.errors import ConfigError
from gradwire.types import EFInput, EncodeContext


@dataclass(frozen=True)
class ChunkTopK(Sparsifier):
    """Sends the `k` largest-magnitude entries of every `chunk`; `values` are fp32, bf16 or fp16.

    Chunks are selected in parallel, which is faster than one selection over all. A shorter last
    chunk sends the same share, at least one entry. In every chunk the squared error is at most
    1 - k/chunk of the squared norm: a contraction. Of equal magnitudes the first come first. With
    one in 64 a position costs 8 bits, where its place in a chunk of 4096 would take 12.
    """

    k: int = 64
    chunk: int = 4096
    values: ValueFormat = "bf16"

    sends_indices: ClassVar = True
    examples: ClassVar = ({}, {"k": 2, "chunk": 16, "values": "fp32"})
    family: ClassVar = "sparsification"
    paper: ClassVar = "Sarfi et al. 2025, arXiv:2508.15706"

    def __post_init__(self) -> None:
        check_whole("chunktopk", "chunk", self.chunk, 1, 1 << 24)
        check_whole("chunktopk", "k", self.k, 1)
        if self.k > self.chunk:
            raise ConfigError(f"chunktopk: k must be at most chunk {self.chunk}, got {self.k}")
        check_format("chunktopk", self.values)

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True, block=self.chunk)

    @memoized
    def count(self, numel: int) -> int:
        chunks, rest = divmod(numel, self.chunk)
        return chunks * self.k + self._count_of_rest(rest)

    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        x = ef.total()
        full = x.numel() // self.chunk * self.chunk
        starts = torch.arange(0, full, self.chunk, device=x.device).unsqueeze(1)
        chunks = _largest(x[:full].view(-1, self.chunk), self.k) + starts
        rest = _largest(x[full:].view(1, -1), self._count_of_rest(x.numel() - full)) + full
        return torch.cat([chunks.view(-1), rest.view(-1)])

    def _count_of_rest(self, numel: int) -> int:
        return count_for_ratio(self.k / self.chunk, numel)


def _largest(rows: Tensor, count: int) -> Tensor:
    """Returns the columns of the `count` largest magnitudes per row, ascending; NaN is largest."""
    width = rows.shape[1]
    # Magnitudes are ordered as their bits are; the reversed column breaks ties.
    column = torch.arange(width - 1, -1, -1, device=rows.device)
    keys = rows.abs().view(torch.int32).to(torch.int64) * width + column
    return keys.topk(count, dim=1).indices.sort(dim=1).values
