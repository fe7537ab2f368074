"""A bucket's conversation as CUDA graphs: what lanes launch kernel by kernel goes out as a whole.

Between two calls to the network a conversation is work on a GPU that is the same at every step: it
reads gradients and what lanes remember where they lie, and writes messages and drafts. So a step is
run once under CUDA's stream capture and replayed from then on. Python's part, which for many small
lanes takes longer than the GPU's, falls away. Random numbers stay those of their step: their keys
lie on the GPU too, and are renewed before each replay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.capture import capture
from laconic.comm.base import Call, Conversation
from laconic.keys import Keys, LaneKeys
from laconic.step import Ended, Lane
from laconic.types import State

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
    call: Call | None


class Recording:
    """One step of some lanes, to be taken again with other gradients in the same places.

    Takes the place of the conversation that `talk` begins, first to record it and then to be it.
    The tensors that this conversation returns must be those that it computes. One that is left at a
    call, first and ever after, is recorded and replayed up to there.
    """

    def __init__(self, lanes: Sequence[Lane], talk: Callable[[], Conversation[Ended]]) -> None:
        self._talk = talk
        self._device = lanes[0].device
        self._keys = Keys(self._device)
        self._lanes = lanes
        self._memories: list[_Memories] = []
        self._segments: list[_Segment] = []
        self._result = Ended()
        self._rehearsed = False
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def made(self) -> bool:
        """Whether the next conversation is a replay."""
        return bool(self._segments)

    def talk(self) -> Conversation[Ended]:
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

    def _rehearse(self) -> Conversation[Ended]:
        """The step itself with keys on the GPU, since no kernel may be loaded under capture."""
        self._rehearsed = True
        for lane in self._lanes:
            lane.turn = lane.turn._replace(keys=LaneKeys(self._keys, lane))
        try:
            return (yield from self._talk())
        finally:
            for lane in self._lanes:
                lane.turn = lane.turn._replace(keys=None)
            self._keys.end_rehearsal()

    def _record(self) -> Conversation[Ended]:
        for lane in self._lanes:
            lane.turn = lane.turn._replace(keys=LaneKeys(self._keys, lane))
            room, _ = lane.begin()
            self._memories.append(_Memories(lane, dict(lane.kept), dict(lane.talk), dict(room)))
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
                own.lane.turn = own.lane.turn._replace(keys=None)
                own.then, own.draft = (dict(state) for state in own.lane.drafted())

    def _captured(
        self,
        graph: torch.cuda.CUDAGraph,
        conversation: Conversation[Ended],
        told: list[Tensor] | None,
    ) -> Call | None:
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
            for place, now in ((own.kept, lane.kept), (own.talk, lane.talk)):
                for key, tensor in place.items():
                    if now[key] is not tensor:
                        there.append(tensor)
                        here.append(now[key])
            lane.kept, lane.talk = dict(own.kept), dict(own.talk)
        if there:
            torch._foreach_copy_(there, here)


class Recorder:
    """The recordings of a model's buckets: made when gradients have come to lie still."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._times: dict[tuple[str, ...], int] = {}
        self._made: dict[tuple[str, ...], Recording] = {}

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
        talk: Callable[[], Conversation[Ended]],
    ) -> Recording | None:
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
            self._made[bucket] = Recording(here, talk)
        return self._made[bucket]


def is_sampled(lane: Lane) -> bool:
    """Whether the lane's next step measures its error, which is not part of other steps."""
    return lane.turn.step % lane.sample_every == 0


def is_steady(lane: Lane) -> bool:
    """Whether the lane does the same work at every step, without asking the host."""
    traits = lane.compressor.traits()
    return lane.talker.steady and not (traits.varies or traits.waits or traits.by_step)


def _move(places: Sequence[Tensor], told: Sequence[Tensor]) -> None:
    """Puts an answer where the recorded step expects it, unless it lies there."""
    pairs = zip(places, told, strict=True)
    apart = [(to, by) for to, by in pairs if to.data_ptr() != by.data_ptr()]
    if apart:
        torch._foreach_copy_([to for to, _ in apart], [by for _, by in apart])
