"""One step with error feedback, of any method, as a call that can be timed repeatedly."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from gradwire.base import Compressor, MultiRound, OneRound, encode_with_feedback
from gradwire.compressors._sparsifier import ThresholdSparsifier
from gradwire.types import AllGather, EFInput, EncodeContext, Mean, Parts, State

Collective: TypeAlias = Callable[[], object]

WARM_UPS = 3
HALF = 0.5


def ef_step(compressor: Compressor, x: Tensor, ctx: EncodeContext) -> Collective:
    """Gradient and residual in, message and new residual out.

    The residual is renewed in place, and counts half in the next call: so it comes to the gradient
    itself where nothing is said, and does not grow from call to call. A method that may not have a
    residual is measured without one.
    """
    ef = _given(compressor, x)
    if isinstance(compressor, OneRound):
        return lambda: encode_with_feedback(compressor, ef, ctx)
    assert isinstance(compressor, MultiRound)
    alone = ctx._replace(world_size=1)
    state = compressor.state(alone, x.device)
    # The mean goes to the memory of the gradient, which must be there for the next call.
    kept = ef._replace(grad=ef.grad.clone())
    return lambda: _alone(compressor, kept, state, alone)


def replayed_step(compressor: Compressor, x: Tensor, ctx: EncodeContext) -> Collective:
    """The same with the card's work as a CUDA graph.

    Where the length of a message varies, the host asks for it after each replay.
    """
    if not isinstance(compressor, ThresholdSparsifier):
        return replay_of(ef_step(compressor, x, ctx))
    ef, drafts = _given(compressor, x), list[Parts]()

    def draft() -> None:
        drafts.append(compressor.draft(ef, ctx))

    replay = replay_of(draft)

    def step() -> int:
        replay()
        return int(drafts[-1][0])

    return step


def _given(compressor: Compressor, x: Tensor) -> EFInput:
    grad = x.view(-1)
    feeds_back = compressor.traits().contraction or compressor.traits().accumulates
    residual = left = torch.zeros_like(grad) if feeds_back else None
    return EFInput(grad, residual, left, HALF)


def replay_of(call: Collective) -> Collective:
    """The call as a CUDA graph: the work of the card, without the host's part in it.

    Raises RuntimeError where the host takes part in the work itself.
    """
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            call()
    here.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _alone(method: MultiRound, ef: EFInput, state: State, ctx: EncodeContext) -> None:
    """A conversation in a world of one, where every answer is what was said."""
    talk = method.rounds(ef, state, ctx)
    try:
        request = next(talk)
        while True:
            assert isinstance(request, Mean | AllGather)
            request = talk.send([request.parts])
    except StopIteration:
        return
