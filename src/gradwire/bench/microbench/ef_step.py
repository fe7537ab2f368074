"""One step with error feedback, of any method, as a call that can be timed repeatedly."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from gradwire.base import Compressor, MultiRound, OneRound, encode_with_feedback
from gradwire.compressors._sparsifier import ThresholdSparsifier
from gradwire.types import AllGather, EFInput, EncodeContext, Mean, Parts, State

TimedCall: TypeAlias = Callable[[], object]

WARM_UPS = 3
HALF = 0.5


def ef_step(compressor: Compressor, x: Tensor, ctx: EncodeContext) -> TimedCall:
    """Returns a call that takes gradient and residual and makes a message and a new residual.

    The residual is renewed in place, with a decay of one half: so for an entry that is never sent
    it converges to the gradient and does not grow from call to call. A method that must not have a
    residual is measured without one.
    """
    ef = _ef_input(compressor, x)
    if isinstance(compressor, OneRound):
        return lambda: encode_with_feedback(compressor, ef, ctx)
    assert isinstance(compressor, MultiRound)
    single_rank = ctx._replace(world_size=1)
    state = compressor.state(single_rank, x.device)
    # The mean overwrites the gradient, which the next call needs.
    ef_copy = ef._replace(grad=ef.grad.clone())
    return lambda: _run_single_rank(compressor, ef_copy, state, single_rank)


def replayed_step(compressor: Compressor, x: Tensor, ctx: EncodeContext) -> TimedCall:
    """Returns the step of `ef_step` with the GPU's work as a CUDA graph.

    If the length of a message varies, the host reads it after each replay.
    """
    if not isinstance(compressor, ThresholdSparsifier):
        return replay_of(ef_step(compressor, x, ctx))
    ef, padded = _ef_input(compressor, x), list[Parts]()

    def encode() -> None:
        padded.append(compressor.encode_padded(ef, ctx))

    replay = replay_of(encode)

    def step() -> int:
        replay()
        return int(padded[-1][0])

    return step


def _ef_input(compressor: Compressor, x: Tensor) -> EFInput:
    grad = x.view(-1)
    feeds_back = compressor.traits().contraction or compressor.traits().accumulates
    residual = residual_out = torch.zeros_like(grad) if feeds_back else None
    return EFInput(grad, residual, residual_out, HALF)


def replay_of(call: TimedCall) -> TimedCall:
    """Captures the call as a CUDA graph: the work of the GPU, without that of the host.

    Raises RuntimeError if the host takes part in the work itself.
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


def _run_single_rank(method: MultiRound, ef: EFInput, state: State, ctx: EncodeContext) -> None:
    """Runs the rounds of a single rank, where every answer is the rank's own message."""
    rounds = method.rounds(ef, state, ctx)
    try:
        request = next(rounds)
        while True:
            assert isinstance(request, Mean | AllGather)
            request = rounds.send([request.parts])
    except StopIteration:
        return
