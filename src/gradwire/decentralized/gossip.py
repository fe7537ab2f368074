"""Gossip: a worker sends one message to its neighbors, and averages what it knows of their vectors.

A compressed message holds the difference to the worker's public copy, which it and its neighbors
keep, as in CHOCO-SGD (Koloskova, Stich & Jaggi 2019, arXiv:1902.00340). One sum of the neighbors'
copies is enough, whatever their number. Vectors that are not compressed are sent as they are.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.base import OneRound
from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.decentralized.mixing import Mixing
from gradwire.engine.engine import Engine
from gradwire.engine.plan import DENSE
from gradwire.engine.step import Lane
from gradwire.errors import NonFiniteError
from gradwire.types import EncodeContext, Field, Layout, Parts, State
from gradwire.wire.layout import count_variable, max_packed_bytes, pack, packed_bytes, unpack

_FINITE = Layout((Field(torch.uint8, 1),))
"""One byte ahead of a message: 1 if all that it holds is finite."""


class PublicCopies:
    """The public copies of one vector per parameter: this worker's, and a mean of its neighbors'.

    `own` is the sum of all messages of this worker, and `mixed` the mean of these sums with the
    weights of the mixing matrix; both start from a vector that all workers have. `damping` is the
    share of a message that they take, which below 1 allows compressors that are no contraction.
    """

    def __init__(self, engine: Engine, like: Mapping[str, Tensor], damping: float = 1.0) -> None:
        self.engine, self.damping = engine, damping
        self._dtypes = {name: tensor.dtype for name, tensor in like.items()}
        compressed = {
            name: like[name]
            for name, lane in engine.lanes.items()
            if lane.compressor != DENSE[engine.tensors[name].dtype]
        }
        self.own, self.mixed = wide_copies(compressed), wide_copies(compressed)

    def initialize(self, vectors: Mapping[str, Tensor]) -> None:
        """Starts from vectors that are equal on all workers."""
        for copies in (self.own, self.mixed):
            for name, copy in copies.items():
                copy.copy_(vectors[name])

    def layouts(self) -> list[Layout]:
        return [
            _codec(lane).layout(lane.ctx.numel)
            if name in self.own
            else Layout((Field(self._dtypes[name], lane.ctx.numel),))
            for name, lane in self.engine.lanes.items()
        ]

    def encode(self, vectors: Mapping[str, Tensor]) -> tuple[list[Parts], list[Tensor]]:
        """Returns the messages of flat vectors, and a flag for each: whether it is finite."""
        messages, finite = [], []
        for name, lane in self.engine.lanes.items():
            parts: Parts = (vectors[name],)
            if name in self.own:
                difference = vectors[name].to(self.own[name].dtype) - self.own[name]
                parts = _compress(lane, difference.to(torch.float32))
                finite.append(difference.isfinite().all())
            finite += [part.isfinite().all() for part in parts if part.is_floating_point()]
            messages.append(parts)
        return messages, finite

    def mix(
        self, messages: Mapping[int, Sequence[Parts]], weights: Sequence[float]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields by parameter the weighted mean of all copies minus this worker's own copy.

        `messages` are those of this worker and its neighbors, by rank in order.
        """
        for number, (name, lane) in enumerate(self.engine.lanes.items()):
            parts = {rank: message[number] for rank, message in messages.items()}
            yield name, self._mixed(name, lane, parts, weights)
        self.engine.set_steps({name: lane.ctx.step + 1 for name, lane in self.engine.lanes.items()})

    def _mixed(
        self, name: str, lane: Lane, parts: Mapping[int, Parts], weights: Sequence[float]
    ) -> Tensor:
        own_parts = parts[lane.ctx.rank]
        if name not in self.own:
            own = own_parts[0].to(wide(own_parts[0].dtype))
            total = torch.zeros_like(own)
            for rank, (vector,) in parts.items():
                total.add_(vector, alpha=weights[rank])
            return total.sub_(own)
        own_copy, mixed_copy = self.own[name], self.mixed[name]
        sent = torch.zeros_like(own_copy)
        _decode_add(sent, lane, own_parts, 1.0, lane.ctx)
        total = sent * weights[lane.ctx.rank]
        for rank, message in parts.items():
            if rank != lane.ctx.rank:
                _decode_add(total, lane, message, weights[rank], lane.ctx._replace(rank=rank))
        difference = (mixed_copy + total) - (own_copy + sent)
        own_copy.add_(sent, alpha=self.damping)
        mixed_copy.add_(total, alpha=self.damping)
        return difference


class Gossip:
    """One exchange with the neighbors for several vectors per parameter, in one message.

    `checks_finite` makes a worker, and all that it sends to, raise NonFiniteError in place of using
    a message that is not finite.
    """

    def __init__(
        self, copies: Sequence[PublicCopies], mixing: Mixing, rank: int, checks_finite: bool
    ) -> None:
        self.copies, self.mixing, self.rank = copies, mixing, rank
        self._checks_finite = checks_finite
        flag = [_FINITE] if checks_finite else []
        self._layouts = [*flag, *(layout for one in copies for layout in one.layouts())]
        self.distance = torch.zeros(())
        """Norm of what the last exchange moved the first vectors by, before the factor."""

    def encode(self, vectors: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Returns the message about flat vectors, which may change before it is sent."""
        messages: list[Parts] = []
        finite: list[Tensor] = []
        for copies, own in zip(self.copies, vectors, strict=True):
            some, flags = copies.encode(own)
            messages += some
            finite += flags
        if self._checks_finite:
            messages.insert(0, (torch.stack(finite).all().to(torch.uint8).view(1),))
        return pack(messages, self._layouts)

    def exchange(
        self, buffer: Tensor, step: int, vectors: Sequence[Mapping[str, Tensor]], rate: float
    ) -> CollectiveProgram[None]:
        """Sends an encoded message to all neighbors, and moves the vectors towards theirs.

        A vector moves by `rate` times the weighted mean of all public copies minus its own copy.
        """
        peers, layouts = self.mixing.neighbors(self.rank, step), self._layouts
        sizes = limits = None
        if count_variable(layouts):
            limits = [max_packed_bytes(layouts)] * len(peers.sources)
        else:
            sizes = [packed_bytes(None, layouts)] * len(peers.sources)
        received = yield Collective("neighbors", [buffer], sizes, limits, neighbors=peers)
        buffers = {**dict(zip(peers.sources, received, strict=True)), self.rank: buffer}
        messages = {rank: unpack(buffers[rank], layouts) for rank in sorted(buffers)}
        if self._checks_finite:
            self._check_finite({rank: message.pop(0) for rank, message in messages.items()})
        weights, first, squares = self.mixing.weights(self.rank, step), 0, list[Tensor]()
        for copies, own in zip(self.copies, vectors, strict=True):
            count = len(own)
            ours = {rank: message[first : first + count] for rank, message in messages.items()}
            for name, difference in copies.mix(ours, weights):
                own[name].add_(difference, alpha=rate)
                if not first:
                    squares.append(difference.square().sum())
            first += count
        self.distance = torch.stack(squares).sum().sqrt()

    def message_bytes(self) -> int:
        """Returns the length of a message; lengths that only the sender knows count as 0."""
        return packed_bytes(None, self._layouts)

    def _check_finite(self, flags: Mapping[int, Parts]) -> None:
        bad = [rank for rank, (flag,) in flags.items() if not int(flag)]
        if bad:
            raise NonFiniteError(
                f"what workers {bad} sent to their neighbors is not finite, or overflows the "
                "number format of the compressor; restart from a checkpoint"
            )


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of sums of vectors: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_copies(tensors: Mapping[str, Tensor]) -> State:
    """Returns flat copies of the tensors, in the type of sums."""
    return {
        name: tensor.detach().to(wide(tensor.dtype), copy=True).reshape(-1)
        for name, tensor in tensors.items()
    }


def _codec(lane: Lane) -> OneRound:
    assert isinstance(lane.compressor, OneRound)
    return lane.compressor


def _compress(lane: Lane, difference: Tensor) -> Parts:
    """Encodes a difference; one step in many also measures the relative error."""
    parts = _codec(lane).compress(difference, lane.ctx)
    if lane.ctx.step % lane.sample_every == 0:
        left = difference.clone()
        _decode_add(left, lane, parts, -1.0, lane.ctx)
        norm = difference.norm()
        lane.relative_error = torch.where(norm > 0, left.norm() / norm, 0.0)
    return parts


def _decode_add(out: Tensor, lane: Lane, parts: Parts, weight: float, ctx: EncodeContext) -> None:
    """Adds a decoded message; methods decode to float32, however wide the sum is."""
    if out.dtype == torch.float32:
        _codec(lane).decode_add(out, [parts], weight, ctx)
        return
    decoded = torch.zeros(out.numel(), device=out.device)
    _codec(lane).decode_add(decoded, [parts], 1.0, ctx)
    out.add_(decoded, alpha=weight)
