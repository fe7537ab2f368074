"""Work on a GPU that is noted instead of done, beside all that goes on meanwhile."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


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
