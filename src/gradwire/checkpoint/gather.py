"""Gathers the states of all ranks on rank 0, for checkpoints that are one file.

A rank sends a description of its state, which is JSON, and then the bytes of its tensors. Nothing
is unpickled. Rank 0 compares every length with those of its own state before it allocates memory.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.checkpoint.description import TensorSpec, build, describe, tensor_specs
from gradwire.comm.process_group import peer_error
from gradwire.errors import WireError

PIECE_BYTES = 16 << 20
"""Most bytes of tensors in one message."""

FACTOR = 4
SLACK_BYTES = 1 << 20
"""A rank may send FACTOR times as much as rank 0 has, and SLACK_BYTES more.

States of ranks differ little: by the length of shards, and by the statistics of a controller.
"""

_LENGTH_BYTES = 8

Read: TypeAlias = Callable[[int], Tensor]
"""Returns the next bytes of a sender, as many as requested."""


class Limits(NamedTuple):
    """Upper bounds of the state that another rank may send."""

    description_bytes: int
    tensor_bytes: int


def gather_states(state: Mapping[str, object], device: torch.device) -> dict[str, object]:
    """Returns the states of all ranks by name on rank 0, and the own one on other ranks.

    Ranks send one after the other, so that only rank 0 holds more than one. Raises WireError on
    rank 0, with the rank, if one sends what is not a state.
    """
    whole = dict(state)
    text, tensors = describe(state)
    # gloo cannot send from a GPU.
    device = device if dist.get_backend() == "nccl" else torch.device("cpu")
    if dist.get_rank() > 0:
        for content in contents(text, tensors):
            _transfer(dist.send, content.to(device), 0)
        return whole
    limits = limits_of(text, tensors)
    for rank in range(1, dist.get_world_size()):

        def read(nbytes: int, rank: int = rank) -> Tensor:
            content = torch.empty(nbytes, dtype=torch.uint8, device=device)
            _transfer(dist.recv, content, rank)
            return content.cpu()

        received = receive_state(rank, read, limits)
        if twice := sorted(whole.keys() & received.keys()):
            raise WireError(f"rank {rank} sent the state of {twice}, which an earlier rank has")
        whole |= received
    return whole


def limits_of(text: bytes, tensors: Sequence[Tensor]) -> Limits:
    """Returns the bounds that follow from rank 0's own state."""
    sizes = (len(text), sum(tensor.nbytes for tensor in tensors))
    return Limits(*(FACTOR * size + SLACK_BYTES for size in sizes))


def receive_state(rank: int, read: Read, limits: Limits) -> dict[str, object]:
    """Reads the state of a rank; raises WireError if it is malformed or too large."""
    length = int(read(_LENGTH_BYTES).view(torch.int64))
    if not 0 <= length <= limits.description_bytes:
        raise WireError(
            f"rank {rank} announces {length} bytes of description where "
            f"{limits.description_bytes} is the most"
        )
    try:
        tree = json.loads(read(length).numpy().tobytes())
        specs = tensor_specs(tree)
        nbytes = sum(spec.nbytes for spec in specs)
        if nbytes > limits.tensor_bytes:
            raise ValueError(f"{nbytes} bytes of tensors where {limits.tensor_bytes} is the most")
        state = build(tree, _read_tensors(specs, read))
        if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
            raise ValueError("expected a dict whose keys are strings")
    except (ValueError, RecursionError) as error:
        raise WireError(f"rank {rank} sent a state that cannot be read: {error}") from error
    return state


def contents(text: bytes, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Returns the messages of a sender: the length of the description, itself, and all tensors."""
    yield torch.tensor([len(text)]).view(torch.uint8)
    yield torch.frombuffer(bytearray(text), dtype=torch.uint8)
    flat = [_bytes_of(tensor) for tensor in tensors]
    for piece in _pieces([content.numel() for content in flat]):
        yield torch.cat([flat[slice_.tensor][slice_.start : slice_.stop] for slice_ in piece])


def _read_tensors(specs: Sequence[TensorSpec], read: Read) -> list[Tensor]:
    """Reads the bytes of tensors in pieces, into tensors of these types and shapes."""
    tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    flat = [_bytes_of(tensor) for tensor in tensors]
    for piece in _pieces([spec.nbytes for spec in specs]):
        content = read(sum(slice_.stop - slice_.start for slice_ in piece))
        rows = content.split([slice_.stop - slice_.start for slice_ in piece])
        for slice_, row in zip(piece, rows, strict=True):
            flat[slice_.tensor][slice_.start : slice_.stop] = row
    for tensor, content in zip(tensors, flat, strict=True):
        if tensor.dtype == torch.bool and bool((content > 1).any()):
            raise ValueError("a tensor of bool has bytes other than 0 and 1")
    return tensors


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor; a view of it if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class _Slice(NamedTuple):
    """Some bytes of one tensor, by its number."""

    tensor: int
    start: int
    stop: int


def _pieces(sizes: Sequence[int]) -> Iterator[list[_Slice]]:
    """Divides the bytes of all tensors into messages of PIECE_BYTES and a last, shorter one."""
    piece: list[_Slice] = []
    room = PIECE_BYTES
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            piece.append(_Slice(number, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


def _transfer(send_or_recv: Callable[[Tensor, int], object], content: Tensor, rank: int) -> None:
    """Sends to a rank or receives from it; raises PeerError if it is lost."""
    start_s = monotonic()
    try:
        send_or_recv(content, rank)
    except RuntimeError as error:
        name, size = f"{send_or_recv.__name__} of a state", dist.get_world_size()
        raise peer_error(name, dist.get_rank(), size, monotonic() - start_s, error) from error
