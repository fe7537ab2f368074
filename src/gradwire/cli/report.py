"""Commands that run nothing: `gradwire methods` (the catalogue) and `gradwire report`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.common import Json
from gradwire.cli.output import open_console, show, write_rows


def methods(
    json: Json = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Writes the table between the marks of this file.")
    ] = None,
) -> None:
    """Prints the catalogue and plug-ins: bits per element, default memory and exchange, paper."""
    from gradwire import catalogue

    if markdown is not None:
        catalogue.write_into(markdown)
        return
    plugins, broken = catalogue.plugin_rows()
    rows = [*catalogue.rows(), *plugins]
    if json is not None:
        write_rows(json, map(catalogue.as_dict, rows))
    else:
        from gradwire.bench.report.tables import methods_table

        open_console(json).print(methods_table(rows))
    for name, distribution, reason in broken:
        print(f"gradwire: {name} of {distribution} cannot be used: {reason}", file=sys.stderr)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Files of records, as --json writes them, or folders of *.jsonl."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    plots: Annotated[
        Path | None, typer.Option(help="Also draws every plot there, as PNG and SVG.")
    ] = None,
) -> None:
    """Writes one self-contained page for any number of runs."""
    from gradwire.bench.records.files import files_in, read_every
    from gradwire.bench.report.write import write_report

    records = read_every(files_in(runs))
    write_report(records, output)
    show(output)
    if plots is not None:
        from gradwire.bench.report.figures import write_figures

        for path in write_figures(records, plots):
            show(path)
