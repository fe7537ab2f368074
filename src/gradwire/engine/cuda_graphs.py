"""CUDA graphs: captures the GPU work of a bucket between two collectives, and replays it.

Between two collectives a bucket's program is GPU work that is the same at every step: it reads
gradients and lane state where they lie, and writes messages and pending state. So one step runs
under CUDA's stream capture and is replayed from then on, without the Python part, which takes
longer than the GPU's for many small lanes. Random numbers stay those of their step: their keys lie
in GPU memory and are renewed before each replay.
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

STABLE_STEPS = 2
"""Gradients must lie at the same addresses for this many steps before a step is captured."""

STEPS_BEFORE_REPLAY = STABLE_STEPS + 2
"""Steps until the first replay: one more runs as a warm-up, and one is captured."""

INITIAL_KEYS = 64
"""Initial capacity for keys; the warm-up step finds out how many there are."""


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Captures the GPU work of the block into the graph; other threads may use the GPU meanwhile.

    `pool` is what `torch.cuda.graph_pool_handle` returns.
    """
    outer = torch.cuda.current_stream(device)
    # Captured kernels keep the priority.
    inner = torch.cuda.Stream(device, priority=outer.priority)
    inner.wait_stream(outer)
    with torch.cuda.stream(inner), _without_gc():
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            # Ends the capture too, but the error to report is the one raised inside.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        with warnings.catch_warnings():
            # A lane that sends gradients as they are has no work before its first collective.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            graph.capture_end()
    outer.wait_stream(inner)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disables the garbage collector: freeing a graph would break the capture of another."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class KeyBuffer:
    """The RNG keys of one captured program in GPU memory, each as two 32-bit words."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros(INITIAL_KEYS, 2, dtype=torch.int64, device=device)
        self._keys: list[tuple[Lane, int, Sequence[int]]] = []
        self._warming_up = True

    def end_warm_up(self) -> None:
        """Assigns slots anew from now on; only `renew` fills them."""
        self._keys.clear()
        self._warming_up = False

    def renew(self, first: int = 0) -> None:
        """Writes the keys of each lane's next step into their slots."""
        if len(self._keys) == first:
            return
        some = self._keys[first:]
        keys = [mix(lane.ctx.step, *after, start=before) for lane, before, after in some]
        words = torch.tensor([(key & 0xFFFFFFFF, key >> 32) for key in keys])
        # From pageable memory: the copy is staged before this returns, and nothing waits for it.
        self._words[first : len(self._keys)].copy_(words, non_blocking=True)

    def place(self, lane: Lane, before: int, after: Sequence[int]) -> Tensor:
        """Returns the slot of a key, and assigns one to it."""
        if len(self._keys) == len(self._words):
            assert self._warming_up, "a captured step draws more random numbers than its warm-up"
            # Slots that were handed out have been used already.
            self._words = torch.cat([self._words, torch.zeros_like(self._words)])
        self._keys.append((lane, before, after))
        if self._warming_up:
            self.renew(len(self._keys) - 1)
        return self._words[len(self._keys) - 1]


@dataclass(frozen=True)
class LaneKeys:
    """The `KeyStore` of one lane."""

    keys: KeyBuffer
    lane: Lane

    def place(self, before: int, after: Sequence[int]) -> Tensor:
        return self.keys.place(self.lane, before, after)


@dataclass
class _LaneState:
    """The tensors of a lane that a captured step reads, and those that it writes."""

    lane: Lane
    memory: State
    aggregator: State
    room: State
    """Keeps the tensors alive that the captured step writes to."""
    pending_memory: State = field(default_factory=dict)
    pending_aggregator: State = field(default_factory=dict)


@dataclass(frozen=True)
class _Segment:
    """The work between two collectives: its input buffers, and the next collective if any."""

    graph: torch.cuda.CUDAGraph
    received: list[Tensor] | None
    collective: Collective | None


class CapturedProgram:
    """A bucket's program as CUDA graphs, for gradients at fixed addresses.

    Replaces the program that `start` begins: first warms up, then captures it, then replays it. The
    tensors that the program returns must be those that it computes. A program that is abandoned at
    a collective, always the same one, is captured and replayed up to there.
    """

    def __init__(
        self, lanes: Sequence[Lane], start: Callable[[], CollectiveProgram[BucketResult]]
    ) -> None:
        self._start = start
        self._device = lanes[0].device
        self._keys = KeyBuffer(self._device)
        self._lanes = lanes
        self._states: list[_LaneState] = []
        self._segments: list[_Segment] = []
        self._result = BucketResult([])
        self._warmed_up = False
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def is_captured(self) -> bool:
        """True if the next run is a replay."""
        return bool(self._segments)

    def run(self) -> CollectiveProgram[BucketResult]:
        """Runs the program on the gradients that lie at the captured addresses."""
        if not self._warmed_up:
            return (yield from self._warm_up())
        if not self._segments:
            return (yield from self._capture())
        self._keys.renew()
        self._restore_addresses()
        for own in self._states:
            own.lane.set_pending(dict(own.pending_memory), dict(own.pending_aggregator))
        received: list[Tensor] = []
        for segment in self._segments:
            _copy_to(segment.received or [], received)
            segment.graph.replay()
            if segment.collective is None:
                return self._result
            received = yield segment.collective
        raise AssertionError("a program that was abandoned when captured goes on")

    def _warm_up(self) -> CollectiveProgram[BucketResult]:
        """Runs the step with keys in GPU memory: no kernel may be loaded during capture."""
        self._warmed_up = True
        for lane in self._lanes:
            lane.ctx = lane.ctx._replace(key_store=LaneKeys(self._keys, lane))
        try:
            return (yield from self._start())
        finally:
            for lane in self._lanes:
                lane.ctx = lane.ctx._replace(key_store=None)
            self._keys.end_warm_up()

    def _capture(self) -> CollectiveProgram[BucketResult]:
        for lane in self._lanes:
            lane.ctx = lane.ctx._replace(key_store=LaneKeys(self._keys, lane))
            room, _ = lane.begin_step()
            memory, aggregator = dict(lane.memory_state), dict(lane.aggregator_state)
            self._states.append(_LaneState(lane, memory, aggregator, dict(room)))
        program = self._start()
        received: list[Tensor] | None = None
        try:
            while True:
                graph = torch.cuda.CUDAGraph()
                collective = self._capture_segment(graph, program, received)
                # Only now, since a key is assigned its slot when it is asked for.
                self._keys.renew()
                graph.replay()
                self._segments.append(_Segment(graph, received, collective))
                if collective is None:
                    return self._result
                received = yield collective
        finally:
            for own in self._states:
                own.lane.ctx = own.lane.ctx._replace(key_store=None)
                pending = own.lane.pending()
                own.pending_memory, own.pending_aggregator = (dict(state) for state in pending)

    def _capture_segment(
        self,
        graph: torch.cuda.CUDAGraph,
        program: CollectiveProgram[BucketResult],
        received: list[Tensor] | None,
    ) -> Collective | None:
        """Captures the work up to the next collective and returns it; None after the last."""
        with capture(graph, self._pool, self._device):
            try:
                return next(program) if received is None else program.send(received)
            except StopIteration as end:
                # Without the means, which would keep the gradients alive.
                self._result = end.value._replace(means=[])
                return None

    def _restore_addresses(self) -> None:
        """Copies lane state to where the captured step reads it, if it lies elsewhere."""
        there: list[Tensor] = []
        here: list[Tensor] = []
        for own in self._states:
            lane = own.lane
            pairs = (own.memory, lane.memory_state), (own.aggregator, lane.aggregator_state)
            for captured, current in pairs:
                for key, tensor in captured.items():
                    if current[key] is not tensor:
                        there.append(tensor)
                        here.append(current[key])
            lane.memory_state, lane.aggregator_state = dict(own.memory), dict(own.aggregator)
        if there:
            torch._foreach_copy_(there, here)


class GraphCache:
    """The captured programs of a model's buckets, made once gradients keep their addresses."""

    def __init__(self) -> None:
        self._addresses: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._stable_steps: dict[tuple[str, ...], int] = {}
        self._programs: dict[tuple[str, ...], CapturedProgram] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def has(self, names: Sequence[str]) -> bool:
        """Returns whether the step of these lanes is captured already."""
        program = self._programs.get(tuple(names))
        return program is not None and program.is_captured

    def clear(self) -> None:
        """Drops all graphs, after lanes have changed."""
        self._addresses.clear()
        self._stable_steps.clear()
        self._programs.clear()

    def find(
        self,
        lanes: Mapping[str, Lane],
        names: Sequence[str],
        grads: Sequence[Tensor],
        start: Callable[[], CollectiveProgram[BucketResult]],
    ) -> CapturedProgram | None:
        """Returns the program for these gradients, if there is one or it is time to make it."""
        bucket, addresses = tuple(names), tuple(grad.data_ptr() for grad in grads)
        if self._addresses.get(bucket) != addresses:
            self._addresses[bucket], self._stable_steps[bucket] = addresses, 0
            self._programs.pop(bucket, None)
        self._stable_steps[bucket] += 1
        here = [lanes[name] for name in names]
        if self._stable_steps[bucket] <= STABLE_STEPS or any(is_sampled(lane) for lane in here):
            return None
        if bucket not in self._programs:
            self._programs[bucket] = CapturedProgram(here, start)
        return self._programs[bucket]


def is_sampled(lane: Lane) -> bool:
    """Returns whether the lane's next step measures its error, which other steps do not."""
    return lane.ctx.step % lane.sample_every == 0


def is_graph_safe(lane: Lane) -> bool:
    """Returns whether the lane does the same work at every step, without a host sync."""
    traits = lane.compressor.traits()
    varies = traits.variable_length or traits.syncs_host or traits.step_dependent
    return lane.aggregator.graph_safe and not varies


def _copy_to(places: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Copies received buffers to where the captured step reads them, unless they lie there."""
    pairs = zip(places, received, strict=True)
    apart = [(to, by) for to, by in pairs if to.data_ptr() != by.data_ptr()]
    if apart:
        torch._foreach_copy_([to for to, _ in apart], [by for _, by in apart])
