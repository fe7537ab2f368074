"""The plots of the report; each takes records and returns the plot's data, or None if it is empty.

A new plot is a function of one of these modules and an entry of `PLOTS`.
"""

from collections.abc import Callable, Sequence

from gradwire.bench.records.schema import Record
from gradwire.bench.report.plotdata import Plot
from gradwire.bench.report.plots.bars import (
    kernel_add,
    kernel_cost,
    kernel_decode,
    step_breakdown,
    step_time,
)
from gradwire.bench.report.plots.curves import loss_by_bytes, loss_by_time, metric_by_time
from gradwire.bench.report.plots.frontier import frontier_by_bytes, frontier_by_time

PLOTS: tuple[Callable[[Sequence[Record]], Plot | None], ...] = (
    frontier_by_time,
    frontier_by_bytes,
    step_time,
    kernel_cost,
    kernel_decode,
    kernel_add,
    loss_by_time,
    loss_by_bytes,
    metric_by_time,
    step_breakdown,
)


def plots(records: Sequence[Record]) -> list[Plot]:
    """Returns every non-empty plot of these records of one setting, in the order of `place`."""
    found = [plot(records) for plot in PLOTS]
    return sorted((plot for plot in found if plot is not None), key=lambda plot: plot.place)
