"""A bucket's conversation as CUDA graphs: what lanes launch kernel by kernel goes out as a whole.

Between two calls to the network a conversation is work on a GPU that is the same at every step: it
reads gradients and what lanes remember where they lie, and writes messages and drafts. So a step is
run once under CUDA's stream capture and replayed from then on. Python's part, which for many small
lanes takes longer than the GPU's, falls away. Random numbers stay those of their step: their keys
lie on the GPU too, and are renewed before each replay.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.engine.step import BucketResult, Lane
from gradwire.types import State, mix


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Work inside becomes the graph's; other threads may use the GPU meanwhile.

    `pool` is what `torch.cuda.graph_pool_handle` gives.
    """
    outside, inside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    inside.wait_stream(outside)
    with torch.cuda.stream(inside), _nothing_freed():
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            # Ends the capture, too; but what went wrong is what was raised inside.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        _end(graph)
    outside.wait_stream(inside)


@contextmanager
def _nothing_freed() -> Iterator[None]:
    """Keeps the garbage collector away: a graph that it frees spoils one that is captured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # Who sends gradients as they are has nothing to do before the first call.
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        graph.capture_end()


FIRST = 64
"""Room for so many keys at first; a rehearsal finds out how many there are."""


class Keys:
    """The keys of one recording, each as two words of 32 bits."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros(FIRST, 2, dtype=torch.int64, device=device)
        self._made: list[tuple[Lane, int, Sequence[int]]] = []
        self._rehearsing = True

    def end_rehearsal(self) -> None:
        """From now on places are given out anew, and `renew` alone fills them."""
        self._made.clear()
        self._rehearsing = False

    def renew(self, first: int = 0) -> None:
        """Puts the keys of each lane's next step in their places."""
        if len(self._made) == first:
            return
        made = self._made[first:]
        keys = [mix(lane.ctx.step, *after, start=before) for lane, before, after in made]
        words = torch.tensor([(key & 0xFFFFFFFF, key >> 32) for key in keys])
        # From pageable memory: the copy is staged before this returns, and nobody waits for it.
        self._words[first : len(self._made)].copy_(words, non_blocking=True)

    def place(self, lane: Lane, before: int, after: Sequence[int]) -> Tensor:
        if len(self._made) == len(self._words):
            assert self._rehearsing, "a recorded step draws more random numbers than its rehearsal"
            # Those who were given a place have used it already.
            self._words = torch.cat([self._words, torch.zeros_like(self._words)])
        self._made.append((lane, before, after))
        if self._rehearsing:
            self.renew(len(self._made) - 1)
        return self._words[len(self._made) - 1]


@dataclass(frozen=True)
class LaneKeys:
    """The keys of one lane's turns."""

    keys: Keys
    lane: Lane

    def place(self, before: int, after: Sequence[int]) -> Tensor:
        return self.keys.place(self.lane, before, after)


WARM = 2
"""So many steps in a row gradients have to lie in the same place before one is recorded."""

BEFORE_REPLAYS = WARM + 2
"""Steps until the first that is replayed: one more is taken as they are, and one is recorded."""


@dataclass
class _Memories:
    """What a lane remembers: where a recorded step reads it, and where it writes what follows."""

    lane: Lane
    kept: State
    talk: State
    room: State
    then: State = field(default_factory=dict)
    draft: State = field(default_factory=dict)


@dataclass(frozen=True)
class _Segment:
    """The work between two calls: what it was told, and what it asks for, if it is not the last."""

    graph: torch.cuda.CUDAGraph
    told: list[Tensor] | None
    call: Collective | None


class CapturedProgram:
    """One step of some lanes, to be taken again with other gradients in the same places.

    Takes the place of the conversation that `talk` begins, first to record it and then to be it.
    The tensors that this conversation returns must be those that it computes. One that is left at a
    call, first and ever after, is recorded and replayed up to there.
    """

    def __init__(
        self, lanes: Sequence[Lane], talk: Callable[[], CollectiveProgram[BucketResult]]
    ) -> None:
        self._talk = talk
        self._device = lanes[0].device
        self._keys = Keys(self._device)
        self._lanes = lanes
        self._memories: list[_Memories] = []
        self._segments: list[_Segment] = []
        self._result = BucketResult()
        self._rehearsed = False
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def made(self) -> bool:
        """Whether the next conversation is a replay."""
        return bool(self._segments)

    def talk(self) -> CollectiveProgram[BucketResult]:
        """The conversation about the gradients that are there now."""
        if not self._rehearsed:
            return (yield from self._rehearse())
        if not self._segments:
            return (yield from self._record())
        self._keys.renew()
        self._recall()
        for own in self._memories:
            own.lane.draft(dict(own.then), dict(own.draft))
        told: list[Tensor] = []
        for segment in self._segments:
            _move(segment.told or [], told)
            segment.graph.replay()
            if segment.call is None:
                return self._result
            told = yield segment.call
        raise AssertionError("a step that was left when it was recorded goes on")

    def _rehearse(self) -> CollectiveProgram[BucketResult]:
        """The step itself with keys on the GPU, since no kernel may be loaded under capture."""
        self._rehearsed = True
        for lane in self._lanes:
            lane.ctx = lane.ctx._replace(key_store=LaneKeys(self._keys, lane))
        try:
            return (yield from self._talk())
        finally:
            for lane in self._lanes:
                lane.ctx = lane.ctx._replace(key_store=None)
            self._keys.end_rehearsal()

    def _record(self) -> CollectiveProgram[BucketResult]:
        for lane in self._lanes:
            lane.ctx = lane.ctx._replace(key_store=LaneKeys(self._keys, lane))
            room, _ = lane.begin()
            self._memories.append(
                _Memories(lane, dict(lane.memory_state), dict(lane.aggregator_state), dict(room))
            )
        conversation = self._talk()
        told: list[Tensor] | None = None
        try:
            while True:
                graph = torch.cuda.CUDAGraph()
                call = self._captured(graph, conversation, told)
                # Only now, since a key gets its place when it is asked for.
                self._keys.renew()
                graph.replay()
                self._segments.append(_Segment(graph, told, call))
                if call is None:
                    return self._result
                told = yield call
        finally:
            for own in self._memories:
                own.lane.ctx = own.lane.ctx._replace(key_store=None)
                own.then, own.draft = (dict(state) for state in own.lane.drafted())

    def _captured(
        self,
        graph: torch.cuda.CUDAGraph,
        conversation: CollectiveProgram[BucketResult],
        told: list[Tensor] | None,
    ) -> Collective | None:
        """Captures the work up to the next call, which is returned; None where it was the last."""
        with capture(graph, self._pool, self._device):
            try:
                return next(conversation) if told is None else conversation.send(told)
            except StopIteration as end:
                self._result = end.value
                return None

    def _recall(self) -> None:
        """Sees to it that what lanes remember lies where the recorded step reads it."""
        there: list[Tensor] = []
        here: list[Tensor] = []
        for own in self._memories:
            lane = own.lane
            for place, now in ((own.kept, lane.memory_state), (own.talk, lane.aggregator_state)):
                for key, tensor in place.items():
                    if now[key] is not tensor:
                        there.append(tensor)
                        here.append(now[key])
            lane.memory_state, lane.aggregator_state = dict(own.kept), dict(own.talk)
        if there:
            torch._foreach_copy_(there, here)


class GraphCache:
    """The recordings of a model's buckets: made when gradients have come to lie still."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._times: dict[tuple[str, ...], int] = {}
        self._made: dict[tuple[str, ...], CapturedProgram] = {}

    @property
    def recordings(self) -> int:
        return len(self._made)

    def has(self, names: Sequence[str]) -> bool:
        """Whether the step of these lanes is recorded already."""
        recording = self._made.get(tuple(names))
        return recording is not None and recording.made

    def forget(self) -> None:
        """Starts anew, as lanes have changed."""
        self._places.clear()
        self._times.clear()
        self._made.clear()

    def find(
        self,
        lanes: Mapping[str, Lane],
        names: Sequence[str],
        grads: Sequence[Tensor],
        talk: Callable[[], CollectiveProgram[BucketResult]],
    ) -> CapturedProgram | None:
        """The recording for these gradients, if there is one or it is time to make it."""
        bucket, places = tuple(names), tuple(grad.data_ptr() for grad in grads)
        if self._places.get(bucket) != places:
            self._places[bucket], self._times[bucket] = places, 0
            self._made.pop(bucket, None)
        self._times[bucket] += 1
        here = [lanes[name] for name in names]
        if self._times[bucket] <= WARM or any(is_sampled(lane) for lane in here):
            return None
        if bucket not in self._made:
            self._made[bucket] = CapturedProgram(here, talk)
        return self._made[bucket]


def is_sampled(lane: Lane) -> bool:
    """Whether the lane's next step measures its error, which is not part of other steps."""
    return lane.ctx.step % lane.sample_every == 0


def is_steady(lane: Lane) -> bool:
    """Whether the lane does the same work at every step, without asking the host."""
    traits = lane.compressor.traits()
    return lane.aggregator.graph_safe and not (
        traits.variable_length or traits.syncs_host or traits.step_dependent
    )


def _move(places: Sequence[Tensor], told: Sequence[Tensor]) -> None:
    """Puts an answer where the recorded step expects it, unless it lies there."""
    pairs = zip(places, told, strict=True)
    apart = [(to, by) for to, by in pairs if to.data_ptr() != by.data_ptr()]
    if apart:
        torch._foreach_copy_([to for to, _ in apart], [by for _, by in apart])
