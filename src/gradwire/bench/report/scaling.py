"""Scaling with the number of workers: the same workload and links at several worker counts."""

from collections.abc import Sequence
from typing import NamedTuple

from gradwire.bench import human
from gradwire.bench.records.compare import group, links_words, median_of, train_setting
from gradwire.bench.records.schema import COMPUTE, TrainRecord
from gradwire.bench.report.grid import Cell, Grid, Row, share
from gradwire.bench.report.plotdata import Axis, Curve, Curves, Plot


class Scaling(NamedTuple):
    heading: str
    summary: str
    grid: Grid
    plots: tuple[Plot, ...]


class _ScalingPoint(NamedTuple):
    """The results of a method with one number of workers; medians over seeds."""

    spec: str
    workers: int
    step_ms: float
    efficiency: float | None
    examples_per_s: float | None


def scalings(records: Sequence[TrainRecord]) -> list[Scaling]:
    """Returns one entry per workload and link rate that was run with several worker counts."""
    settings = group(
        (r for r in records if r.status == "done" and r.step_ms is not None),
        lambda r: (r.workload, r.rate if r.shaped else None, r.shaped, r.device),
    )
    return [_scaling(runs) for runs in settings.values() if len({r.workers for r in runs}) > 1]


def _scaling(runs: Sequence[TrainRecord]) -> Scaling:
    settings = group(runs, lambda run: (run.spec, run.workers))
    places = [_scaling_point(spec, workers, own) for (spec, workers), own in settings.items()]
    places = sorted(places, key=lambda place: (place.spec, place.workers))
    numbers = sorted({run.workers for run in runs})
    links = links_words(train_setting(runs[0]).links)
    plots = (_plot(places, "efficiency"), _plot(places, "throughput"))
    return Scaling(
        f"{runs[0].workload} from {numbers[0]} to {numbers[-1]} workers, {links}",
        _summary(places, numbers[-1]),
        _grid(places),
        tuple(plot for plot in plots if plot is not None),
    )


def _scaling_point(spec: str, workers: int, runs: Sequence[TrainRecord]) -> _ScalingPoint:
    step_ms, batch = median_of(run.step_ms for run in runs), runs[0].batch
    assert step_ms is not None
    examples_per_s = None if batch is None else 1e3 * workers * batch / step_ms
    efficiency = median_of(run.scaling_efficiency for run in runs)
    return _ScalingPoint(spec, workers, step_ms, efficiency, examples_per_s)


def _summary(places: Sequence[_ScalingPoint], most: int) -> str:
    methods = [p for p in places if p.workers == most and p.spec != COMPUTE]
    if not methods:
        return f"No method was run with {most} workers."
    best = min(methods, key=lambda place: place.step_ms)
    of_ideal = (
        "" if best.efficiency is None else f", {best.efficiency:.0%} of {most} times one worker"
    )
    return f"With {most} workers {best.spec} has the highest throughput{of_ideal}."


def _plot(places: Sequence[_ScalingPoint], what: str) -> Curves | None:
    shares = what == "efficiency"
    values = {p: p.efficiency if shares else p.examples_per_s for p in places if p.spec != COMPUTE}
    known = {place: value for place, value in values.items() if value is not None}
    lines = group(known, lambda place: place.spec)
    if not lines:
        return None
    title = "Scaling efficiency" if shares else "Throughput"
    caption = "Relative to N workers without communication." if shares else "Of all workers."
    return Curves(
        place=1,
        title=title,
        caption=f"{caption} Further up is better.",
        x=Axis(name="workers", label="workers"),
        y=Axis(name=what, label=what if shares else "examples per second", rises=True),
        traces=tuple(_curve(spec, own, known) for spec, own in lines.items()),
    )


def _curve(spec: str, places: Sequence[_ScalingPoint], values: dict[_ScalingPoint, float]) -> Curve:
    workers = tuple(place.workers for place in places)
    y = tuple(values[place] for place in places)
    return Curve(spec=spec, label=spec, x=tuple(map(float, workers)), y=y, step=workers)


def _grid(places: Sequence[_ScalingPoint]) -> Grid:
    columns = ("method", "workers", "step", "examples per second", "efficiency")
    return Grid(columns, tuple(Row(place.spec, "done", _cells(place)) for place in places))


def _cells(place: _ScalingPoint) -> tuple[Cell, ...]:
    return (
        Cell(place.spec, place.spec),
        Cell(str(place.workers), place.workers),
        Cell(human.duration_ms(place.step_ms), place.step_ms),
        Cell(human.digits(place.examples_per_s), place.examples_per_s),
        share(place.efficiency),
    )
