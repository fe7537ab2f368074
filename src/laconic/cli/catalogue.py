"""`laconic methods`: what there is to choose from."""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.terminal import open_console


def methods(
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    markdown: Annotated[
        Path | None, typer.Option(help="Writes the table between the marks of this file.")
    ] = None,
) -> None:
    """Prints the catalogue: bits an element, default memory and exchange, and the paper."""
    from laconic import catalogue

    if markdown is not None:
        catalogue.write_into(markdown)
    elif json:
        for row in catalogue.rows():
            print(dumps(catalogue.as_dict(row)))
    else:
        from laconic.bench.cases.methods_table import methods_table

        open_console().print(methods_table(catalogue.rows()))
