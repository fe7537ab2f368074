"""Chunked top-k: the largest entries of every chunk, so that every part of a tensor is sent."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Traits, memoized
from gradwire.checks import check_flag, check_whole
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

    A chunk is a run of entries, or with `square` a square of a matrix, whose rows are the tensor's
    first dimension: 64 by 64 for a chunk of 4096. Squares follow each other in bands of 64 rows;
    where a side is no multiple of 64, squares at the edge are cut off, and a chunk is as many
    entries in this order. Tensors of one dimension are cut into runs.
    """

    k: int = 64
    chunk: int = 4096
    values: ValueFormat = "bf16"
    square: bool = False

    sends_indices: ClassVar = True
    examples: ClassVar = (
        {},
        {"k": 2, "chunk": 16, "values": "fp32"},
        {"k": 2, "chunk": 16, "square": True},
    )
    family: ClassVar = "sparsification"
    paper: ClassVar = "Sarfi et al. 2025, arXiv:2508.15706"

    def __post_init__(self) -> None:
        check_whole("chunktopk", "chunk", self.chunk, 1, 1 << 24)
        check_whole("chunktopk", "k", self.k, 1)
        if self.k > self.chunk:
            raise ConfigError(f"chunktopk: k must be at most chunk {self.chunk}, got {self.k}")
        check_format("chunktopk", self.values)
        check_flag("chunktopk", "square", self.square)
        if self.square and isqrt(self.chunk) ** 2 != self.chunk:
            raise ConfigError(f"chunktopk: chunk must be a square number, got {self.chunk}")

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True, block=self.chunk)

    @memoized
    def count(self, numel: int) -> int:
        chunks, rest = divmod(numel, self.chunk)
        return chunks * self.k + self._count_of_rest(rest)

    def select(self, ef: EFInput, ctx: EncodeContext) -> Tensor:
        x = ef.total()
        shape = _matrix_shape(ctx.shape) if self.square else None
        if shape is None:
            return self._select(x)
        side = isqrt(self.chunk)
        chosen = self._select(in_squares(x.view(shape), side))
        return _place_of(chosen, shape, side).sort().values

    def _select(self, x: Tensor) -> Tensor:
        """Returns the positions of the largest entries of every run."""
        full = x.numel() // self.chunk * self.chunk
        starts = torch.arange(0, full, self.chunk, device=x.device).unsqueeze(1)
        chunks = _largest(x[:full].view(-1, self.chunk), self.k) + starts
        rest = _largest(x[full:].view(1, -1), self._count_of_rest(x.numel() - full)) + full
        return torch.cat([chunks.view(-1), rest.view(-1)])

    def _count_of_rest(self, numel: int) -> int:
        return count_for_ratio(self.k / self.chunk, numel)


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns rows and columns of a tensor as a matrix, or None if it is none."""
    numel = torch.Size(shape).numel()
    return (shape[0], numel // shape[0]) if len(shape) > 1 and numel else None


def in_squares(matrix: Tensor, side: int) -> Tensor:
    """Returns the entries square by square, in bands of `side` rows from the top."""
    rows, columns = matrix.shape
    whole, wide = rows // side * side, columns // side * side

    def bands(part: Tensor, height: int) -> Iterator[Tensor]:
        """Yields the squares of a band, and what is left of its rows; one line a band."""
        stacked = part.view(-1, height, columns)
        count = stacked.shape[0]
        squares = stacked[:, :, :wide].reshape(count, height, wide // side, side)
        yield squares.transpose(1, 2).reshape(count, -1)
        yield stacked[:, :, wide:].reshape(count, -1)

    parts = [(matrix[:whole], side), (matrix[whole:], rows - whole)]
    lines = [torch.cat([*bands(p, height)], dim=1).view(-1) for p, height in parts if p.numel()]
    return torch.cat(lines) if len(lines) > 1 else lines[0]


def _place_of(positions: Tensor, shape: tuple[int, int], side: int) -> Tensor:
    """Returns the positions in the matrix of positions in the order of `in_squares`."""
    rows, columns = shape
    band = positions // (side * columns)
    height = (rows - band * side).clamp(max=side)
    in_band = positions - band * side * columns
    square = in_band // (height * side)
    width = (columns - square * side).clamp(max=side)
    in_square = in_band - square * height * side
    row, column = band * side + in_square // width, square * side + in_square % width
    return row * columns + column


def _largest(rows: Tensor, count: int) -> Tensor:
    """Returns the columns of the `count` largest magnitudes per row, ascending; NaN is largest."""
    width = rows.shape[1]
    # Magnitudes are ordered as their bits are; the reversed column breaks ties.
    column = torch.arange(width - 1, -1, -1, device=rows.device)
    keys = rows.abs().view(torch.int32).to(torch.int64) * width + column
    return keys.topk(count, dim=1).indices.sort(dim=1).values
