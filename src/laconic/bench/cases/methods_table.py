"""The catalogue as a table for a terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from laconic.catalogue import Row


def methods_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in (
        "method",
        "family",
        "bits an\nelement",
        "unbiased or\ncontraction",
        "memory",
        "exchange",
    ):
        table.add_column(Text(name), no_wrap=True)
    table.add_column("paper", no_wrap=True, overflow="ellipsis", max_width=24)
    for row in rows:
        cells = [row.spec, row.family, f"{row.bits_per_element:g}", _kind(row)]
        # The number of the paper is in the README's table and in --json; here are few columns.
        paper = row.paper.partition(", arXiv")[0]
        table.add_row(*(Text(cell) for cell in [*cells, row.memory, row.exchange, paper]))
    return table


def _kind(row: Row) -> str:
    if row.unbiased and row.contraction:
        return "both"
    return "unbiased" if row.unbiased else "contraction" if row.contraction else ""
