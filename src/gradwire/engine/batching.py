"""Batching: the requests of many lanes become few collectives, one buffer for each kind."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from gradwire.comm.base import Collective, Subgroup
from gradwire.types import (
    AllGather,
    AllToAll,
    Answer,
    Broadcast,
    InterNode,
    IntraNode,
    Mean,
    Parts,
    Request,
    Scope,
)
from gradwire.wire.layout import (
    count_variable,
    join,
    max_packed_bytes,
    pack,
    packed_bytes,
    split,
    unpack,
)

R = TypeVar("R", Mean, AllGather, AllToAll, Broadcast)

Answers: TypeAlias = dict[int, Answer]


class Batch(NamedTuple):
    """The requests of one scope and kind, served by one collective."""

    collective: Collective | None
    """None if there is nothing to transfer."""
    unbatch: Callable[[list[Tensor]], Answers]
    """Splits the received buffers into the answers of the lanes."""
    between: InterNode | None = None
    """Set if nodes take part as if each were one rank."""


def batches(requests: Mapping[int, Request]) -> Iterator[Batch]:
    """Yields the collectives that serve all requests, in the same order on all ranks.

    A buffer is packed when the collective before it has ended.
    """
    for scope in dict.fromkeys(request.scope for request in requests.values()):
        same = {lane: r for lane, r in requests.items() if r.scope == scope}
        if means := _of_kind(same, Mean):
            batch = _mean(means)
            yield batch if scope is None else _in_scope(scope, batch)
        if gathers := _of_kind(same, AllGather):
            batch = _all_gather(gathers)
            yield batch if scope is None else _in_scope(scope, batch)
        if exchanges := _of_kind(same, AllToAll):
            batch = _all_to_all(exchanges)
            yield batch if scope is None else _in_scope(scope, batch)
        broadcasts = _of_kind(same, Broadcast)
        for root in sorted({r.root for r in broadcasts.values()}):
            rooted = {lane: r for lane, r in broadcasts.items() if r.root == root}
            batch = _broadcast(rooted)
            yield batch if scope is None else _in_scope(scope, batch)


def _of_kind(requests: Mapping[int, Request], kind: type[R]) -> dict[int, R]:
    return {lane: r for lane, r in requests.items() if isinstance(r, kind)}


def _in_scope(scope: Scope, batch: Batch) -> Batch:
    if isinstance(scope, IntraNode) and batch.collective is not None:
        subgroup = Subgroup(scope.node, internode=False)
        return batch._replace(collective=replace(batch.collective, subgroup=subgroup))
    return batch._replace(between=scope) if isinstance(scope, InterNode) else batch


def _mean(requests: Mapping[int, Mean]) -> Batch:
    parts = [part for request in requests.values() for part in request.parts]

    def unbatch(received: list[Tensor]) -> Answers:
        means = iter(split(received[0], parts) if received else parts)
        return {lane: [tuple(next(means) for _ in r.parts)] for lane, r in requests.items()}

    nothing = not any(part.numel() for part in parts)
    collective = None if nothing else Collective("mean", [join(parts)])
    return Batch(collective, unbatch)


def _all_gather(requests: Mapping[int, AllGather]) -> Batch:
    some = list(requests.values())
    buffer = pack([r.parts for r in some], [r.layout for r in some])
    layouts = list(zip(*(r.layouts for r in some), strict=True))  # [ranks][lanes]

    def unbatch(received: list[Tensor]) -> Answers:
        buffers = received or [buffer] * len(layouts)
        return _by_lane(requests, [unpack(b, row) for b, row in zip(buffers, layouts, strict=True)])

    sizes = None if count_variable(layouts[0]) else [packed_bytes(None, row) for row in layouts]
    limits = [max_packed_bytes(row) for row in layouts] if sizes is None else None
    nothing = sizes is not None and not any(sizes)
    collective = None if nothing else Collective("gather", [buffer], sizes, limits)
    return Batch(collective, unbatch)


def _all_to_all(requests: Mapping[int, AllToAll]) -> Batch:
    some = list(requests.values())
    layouts = list(zip(*(r.layouts for r in some), strict=True))  # [ranks][lanes]
    messages = list(zip(*(r.messages for r in some), strict=True))
    buffers = [pack(parts, row) for parts, row in zip(messages, layouts, strict=True)]
    mine = layouts[some[0].rank]

    def unbatch(received: list[Tensor]) -> Answers:
        return _by_lane(requests, [unpack(buffer, mine) for buffer in received])

    sizes = None if count_variable(mine) else [packed_bytes(None, mine)] * len(layouts)
    limits = [max_packed_bytes(mine)] * len(layouts) if sizes is None else None
    return Batch(Collective("all_to_all", buffers, sizes, limits), unbatch)


def _broadcast(requests: Mapping[int, Broadcast]) -> Batch:
    some = list(requests.values())
    layouts = [r.layout for r in some]
    assert not count_variable(layouts), "a broadcast needs lengths that all ranks know"

    def unbatch(received: list[Tensor]) -> Answers:
        return _by_lane(requests, [unpack(received[0], layouts)])

    buffer = pack([r.parts for r in some], layouts)
    collective = Collective("broadcast", [buffer], root=some[0].root)
    return Batch(collective, unbatch)


def _by_lane(lanes: Mapping[int, object], messages: list[list[Parts]]) -> Answers:
    """Turns messages by rank and lane into answers by lane."""
    return {lane: [row[i] for row in messages] for i, lane in enumerate(lanes)}
