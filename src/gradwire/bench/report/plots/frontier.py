"""The Pareto front of methods: final metric or loss against time and against bytes sent."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradwire.bench.records.compare import LOSS, group, median_of
from gradwire.bench.records.schema import COMPUTE, Direction, Record, TrainRecord
from gradwire.bench.report.plotdata import Axis, Dot, Dots


class Frontier(NamedTuple):
    """The metric or loss of runs, its better direction, and one dot per method."""

    name: str
    better: Direction
    dots: tuple[Dot, ...]


def frontier_plot(
    records: Sequence[Record], place: int, axis: Axis, cost: Callable[[TrainRecord], float]
) -> Dots | None:
    """Plots the final metric or loss of runs against their cost on `axis`."""
    found = frontier(records, cost)
    if found is None:
        return None
    direction = "left and up" if found.better == "higher" else "left and down"
    return Dots(
        place=place,
        title=f"Final {found.name} against {axis.name}",
        caption=f"The end of each run; {direction} is better. The line is the Pareto front.",
        x=axis,
        y=Axis(name=found.name, label=f"{found.name} at the end"),
        traces=found.dots,
    )


def frontier(records: Sequence[Record], cost: Callable[[TrainRecord], float]) -> Frontier | None:
    """Returns the final metric, or else the loss, of finished runs against their cost."""
    runs = [
        r
        for r in records
        if isinstance(r, TrainRecord) and r.status == "done" and r.points and r.spec != COMPUTE
    ]
    if len({run.spec for run in runs}) < 2:
        return None
    name, better = _quality(runs)
    groups = group(runs, lambda run: run.spec)
    dots = [_dot(spec, own, cost, name) for spec, own in groups.items()]
    return Frontier(name, better, _marked(dots, -1 if better == "higher" else 1))


def _quality(runs: Sequence[TrainRecord]) -> tuple[str, Direction]:
    names = {run.metric_name for run in runs}
    if len(names) == 1 and None not in {run.metric for run in runs}:
        return str(names.pop()), runs[0].metric_better or "higher"
    return LOSS, "lower"


def _dot(
    spec: str, runs: Sequence[TrainRecord], cost: Callable[[TrainRecord], float], name: str
) -> Dot:
    """Makes a dot of the medians over seeds, with the range of the metric or loss."""
    values = [run.points[-1].loss if name == LOSS else run.metric or 0.0 for run in runs]
    x, y = median_of(map(cost, runs)), median_of(values)
    assert x is not None
    assert y is not None
    return Dot(spec=spec, x=x, y=y, low=min(values), high=max(values), best=False)


def _marked(dots: Sequence[Dot], sign: int) -> tuple[Dot, ...]:
    """Sorts dots by cost, and marks those that are better than all that cost no more."""
    marked: list[Dot] = []
    lowest = float("inf")
    for dot in sorted(dots, key=lambda dot: (dot.x, sign * dot.y)):
        best = sign * dot.y < lowest
        lowest = min(lowest, sign * dot.y)
        marked.append(Dot(dot.spec, dot.x, dot.y, dot.low, dot.high, best))
    return tuple(marked)


def frontier_by_time(records: Sequence[Record]) -> Dots | None:
    cost = Axis(name="time", label="time of the run", unit="s", log=True)
    return frontier_plot(records, 1, cost, lambda run: run.points[-1].time_s)


def frontier_by_bytes(records: Sequence[Record]) -> Dots | None:
    cost = Axis(name="bytes", label="sent by each worker", unit="B", log=True)
    return frontier_plot(records, 2, cost, lambda run: run.points[-1].sent_bytes)
