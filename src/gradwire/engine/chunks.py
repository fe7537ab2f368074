"""Chunks: a large parameter is cut along its first dimension into lanes of their own.

The messages of chunks are exchanged one after the other, so that one is encoded while another is on
the wire. Squared norms of chunks add up to that of the whole, so a method that is unbiased or a
contraction for every chunk is so for the whole. The results differ from those of an uncut tensor
where a method has one scale, threshold, number of entries or pair of factors for a tensor: then
every chunk has its own. Blocks of a method (`Traits.block`) are never cut.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.base import Compressor
from gradwire.errors import ConfigError
from gradwire.types import State

CHUNK_BYTES = 25 << 20
"""Default size of a chunk, which is that of DDP's buckets."""


class Chunk(NamedTuple):
    """A range of rows of a parameter, and the name of its lane."""

    name: str
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the chunk of a tensor that is shaped like the parameter, as a view."""
        return tensor[self.start : self.stop]


def cut(name: str, tensor: Tensor, block: int, chunk_bytes: int) -> list[Chunk]:
    """Returns the chunks of a parameter, of at most `chunk_bytes` each if its rows allow that.

    Their lengths differ by less than a block, and the list is empty if the parameter is not cut.
    """
    if not chunk_bytes or tensor.nbytes <= chunk_bytes:
        return []
    rows = tensor.shape[0]
    unit = _rows_per_unit(tensor, block)
    units = -(-rows // unit)
    per_chunk = max(1, chunk_bytes // _row_bytes(tensor) // unit)
    count = -(-units // per_chunk)
    edges = [min(rows, units * i // count * unit) for i in range(count + 1)]
    if count == 1:
        return []
    return [Chunk(f"{name}[{start}:{stop}]", start, stop) for start, stop in pairwise(edges)]


def check_chunk_bytes(
    compressor: Compressor, tensors: Mapping[str, Tensor], chunk_bytes: int
) -> None:
    """Raises ConfigError if a parameter would be cut where the method's maths does not allow it."""
    block = compressor.traits().block
    for name, tensor in tensors.items():
        if tensor.nbytes <= chunk_bytes:
            continue
        unit_bytes = _rows_per_unit(tensor, block) * _row_bytes(tensor)
        if chunk_bytes < unit_bytes:
            blocks = f" and whole blocks of {block} entries" if block > 1 else ""
            raise ConfigError(
                f"chunk_bytes must be at least {unit_bytes} for parameter {name!r} of shape "
                f"{tuple(tensor.shape)}, since chunks hold whole rows{blocks}; got {chunk_bytes}"
            )
        shape = cut(name, tensor, block, chunk_bytes)[0].of(tensor).shape
        dense_bytes = shape.numel() * tensor.itemsize
        if compressor.nbytes(shape) >= dense_bytes:
            raise ConfigError(
                f"chunk_bytes: a chunk of {dense_bytes} bytes of parameter {name!r}, of shape "
                f"{tuple(shape)}, would not become shorter; got {chunk_bytes}"
            )


def _row_bytes(tensor: Tensor) -> int:
    return tensor.nbytes // tensor.shape[0]


def _rows_per_unit(tensor: Tensor, block: int) -> int:
    """Returns the fewest rows that make whole blocks."""
    return block // gcd(block, tensor.numel() // tensor.shape[0])


def split_messages(
    chunks: Mapping[str, Sequence[Chunk]], names: Sequence[str], grads: Sequence[Tensor]
) -> list[tuple[list[str], list[Tensor]]]:
    """Returns the lanes and gradients of each message of a bucket.

    The first holds all parameters that are not cut and one chunk; every other chunk has its own.
    """
    first: tuple[list[str], list[Tensor]] = ([], [])
    messages = [first]
    for name, grad in zip(names, grads, strict=True):
        if name not in chunks:
            first[0].append(name)
            first[1].append(grad)
            continue
        for chunk in chunks[name]:
            messages.append(([chunk.name], [chunk.of(grad)]))
    if len(messages) > 1:
        [lane], [grad] = messages.pop(1)
        first[0].append(lane)
        first[1].append(grad)
    return messages


def recut(states: Sequence[State], lengths: Sequence[int]) -> list[State] | None:
    """Returns the states of lanes that cover the same entries in other chunks.

    None if a state does not have one value per entry, so that it cannot be cut.
    """
    joined = {key: torch.cat([state[key].view(-1) for state in states]) for key in states[0]}
    if any(tensor.numel() != sum(lengths) for tensor in joined.values()):
        return None
    pieces = {key: tensor.split(list(lengths)) for key, tensor in joined.items()}
    return [{key: pieces[key][i].clone() for key in pieces} for i in range(len(lengths))]
