"""Builds the automatic mode of an engine."""

from collections.abc import Callable

from gradwire.auto.auto import Auto
from gradwire.auto.candidates import candidates, start_index
from gradwire.auto.runtime import AutoRuntime
from gradwire.auto.search import Search
from gradwire.auto.table import Table
from gradwire.comm.cost_model import LinkModel
from gradwire.control.timing import Clock
from gradwire.engine.engine import Engine


def automatic(
    config: Auto,
    engine: Engine,
    clock: Clock,
    timer: Callable[[], float],
    link: LinkModel,
    adaptive: bool | None,
    overlaps: bool,
) -> AutoRuntime:
    """Switches the engine to its first plan, and returns the observer to set.

    `adaptive` is whether the optimiser rescales every entry, as Adam does. If it is not known,
    methods that would stall under such an optimiser are not admitted.
    """
    tensors = engine.tensors
    suits_all = adaptive is False
    options = candidates(
        engine.plan, tensors.values(), engine.world_size, link, adaptive=not suits_all
    )
    dense_bytes = sum(tensor.nbytes for tensor in tensors.values())
    start = start_index(options, dense_bytes, link, engine.world_size)
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    table = Table(config, options, link, engine.world_size, not suits_all, overlaps, replays=on_gpu)
    return AutoRuntime(Search(table, start), engine, clock, timer)
