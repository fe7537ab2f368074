"""Builds the automatic mode of an engine."""

from collections.abc import Callable

from gradwire.auto.auto import Auto
from gradwire.auto.candidates import start_index
from gradwire.auto.groups import parameter_groups
from gradwire.auto.plans import Plans
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
    plans = Plans(
        engine.plan,
        tuple(tensors.values()),
        parameter_groups(tensors),
        engine.world_size,
        # If it is not known, too.
        adaptive=adaptive is not False,
    )
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    table = Table(config, plans, link, overlaps, replays=on_gpu)
    dense_bytes = sum(tensor.nbytes for tensor in tensors.values())
    start = start_index(table.options, dense_bytes, link, engine.world_size)
    return AutoRuntime(Search(table, start), engine, clock, timer)
