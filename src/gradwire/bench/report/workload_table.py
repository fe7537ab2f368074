"""The table of workloads that `gradwire bench workloads` prints."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.table import Table
from rich.text import Text

from gradwire.bench.workloads.base import parameter_count, parse_workload, workload_classes


class Row(NamedTuple):
    name: str
    title: str
    parameters: int
    batch_size: int
    metric: str
    better: str
    data: str | None
    home: str | None


def rows() -> list[Row]:
    return [_row(name) for name in workload_classes()]


def table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in ("workload", "what it trains", "para-\nmeters", "metric"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        arrow = "↑" if row.better == "higher" else "↓"
        size = f"{row.parameters / 1e6:5.2f} M"
        cells = (row.name, row.title, size, f"{row.metric} {arrow}")
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _row(name: str) -> Row:
    workload = parse_workload(name)
    # On the meta device only sizes are computed; no memory is allocated.
    with torch.device("meta"):
        model = workload.build()
    source = workload.source
    return Row(
        name=name,
        title=workload.title,
        parameters=parameter_count(model),
        batch_size=workload.batch_size,
        metric=workload.metric.name,
        better=workload.metric.better,
        data=None if source is None else source.name,
        home=None if source is None else source.home,
    )
