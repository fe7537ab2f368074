"""The requests of many lanes as few calls: one buffer for all that ask for the same."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram, Subgroup
from gradwire.comm.internode import relay
from gradwire.types import (
    AllGather,
    AllToAll,
    Answer,
    Broadcast,
    IntraNode,
    Layout,
    Mean,
    Parts,
    Request,
    Scope,
)
from gradwire.wire.layout import join, longest, pack, packed_bytes, secrets, split, unpack

T = TypeVar("T")
R = TypeVar("R", Mean, AllGather, AllToAll, Broadcast)


def carry(waiting: Mapping[int, Request]) -> CollectiveProgram[dict[int, Answer]]:
    """Answers every waiting lane; all ranks make the same calls in the same order."""
    answers: dict[int, Answer] = {}
    for scope in dict.fromkeys(request.scope for request in waiting.values()):
        some = {lane: r for lane, r in waiting.items() if r.scope == scope}
        answers |= yield from _among(scope, _carry(some))
    return answers


def _carry(waiting: Mapping[int, Request]) -> CollectiveProgram[dict[int, Answer]]:
    answers: dict[int, Answer] = {}
    answers |= yield from _means(_of_kind(waiting, Mean))
    answers |= yield from _gathers(_of_kind(waiting, AllGather))
    answers |= yield from _scatters(_of_kind(waiting, AllToAll))
    answers |= yield from _broadcasts(_of_kind(waiting, Broadcast))
    return answers


def _among(scope: Scope, calls: CollectiveProgram[T]) -> CollectiveProgram[T]:
    """The same calls, made by those who take part."""
    try:
        call = next(calls)
        while True:
            call = calls.send((yield from _made(call, scope)))
    except StopIteration as end:
        result: T = end.value
        return result


def _made(call: Collective, scope: Scope) -> CollectiveProgram[list[Tensor]]:
    if scope is None:
        return (yield call)
    if isinstance(scope, IntraNode):
        return (yield replace(call, ring=Subgroup(scope.node, across=False)))
    return (yield from relay(call, scope))


def _of_kind(waiting: Mapping[int, Request], kind: type[R]) -> dict[int, R]:
    return {lane: r for lane, r in waiting.items() if isinstance(r, kind)}


def _means(requests: Mapping[int, Mean]) -> CollectiveProgram[dict[int, Answer]]:
    parts = [part for request in requests.values() for part in request.parts]
    if sum(part.numel() for part in parts):
        [flat] = yield Collective("mean", [join(parts)])
        parts = split(flat, parts)
    means = iter(parts)
    return {lane: [tuple(next(means) for _ in r.parts)] for lane, r in requests.items()}


def _gathers(requests: Mapping[int, AllGather]) -> CollectiveProgram[dict[int, Answer]]:
    if not requests:
        return {}
    asked = list(requests.values())
    buffer = pack([r.parts for r in asked], [r.layout for r in asked])
    layouts = [list(row) for row in zip(*(r.layouts for r in asked), strict=True)]
    sizes = None if secrets(layouts[0]) else [packed_bytes(None, row) for row in layouts]
    limits = [longest(row) for row in layouts] if sizes is None else None
    silent = sizes is not None and not any(sizes)
    buffers = (
        [buffer] * len(layouts) if silent else (yield Collective("gather", [buffer], sizes, limits))
    )
    heard = [unpack(b, row) for b, row in zip(buffers, layouts, strict=True)]
    return _by_lane(requests, heard)


def _scatters(requests: Mapping[int, AllToAll]) -> CollectiveProgram[dict[int, Answer]]:
    if not requests:
        return {}
    asked = list(requests.values())
    layouts: list[list[Layout]] = [
        list(row) for row in zip(*(r.layouts for r in asked), strict=True)
    ]
    messages = [list(row) for row in zip(*(r.messages for r in asked), strict=True)]
    buffers = [pack(said, form) for said, form in zip(messages, layouts, strict=True)]
    mine = layouts[asked[0].rank]
    sizes = None if secrets(mine) else [packed_bytes(None, mine)] * len(layouts)
    limits = [longest(mine)] * len(layouts) if sizes is None else None
    heard = [unpack(b, mine) for b in (yield Collective("scatter", buffers, sizes, limits))]
    return _by_lane(requests, heard)


def _broadcasts(requests: Mapping[int, Broadcast]) -> CollectiveProgram[dict[int, Answer]]:
    answers: dict[int, Answer] = {}
    for root in sorted({r.root for r in requests.values()}):
        told = {lane: r for lane, r in requests.items() if r.root == root}
        layouts = [r.layout for r in told.values()]
        assert not secrets(layouts), "a broadcast needs lengths that all ranks know"
        buffer = pack([r.parts for r in told.values()], layouts)
        [heard] = yield Collective("broadcast", [buffer], root=root)
        answers |= _by_lane(told, [unpack(heard, layouts)])
    return answers


def _by_lane(lanes: Mapping[int, object], heard: list[list[Parts]]) -> dict[int, Answer]:
    """Messages by rank, then lane, as answers by lane."""
    return {lane: [row[i] for row in heard] for i, lane in enumerate(lanes)}
