"""`laconic report`: one page about runs that were made before."""

from pathlib import Path
from typing import Annotated

import typer


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
    """Writes one self-contained page about any number of runs."""
    from laconic.bench.records.files import files_in
    from laconic.bench.records.kinds import read_every
    from laconic.bench.report.write import write_report

    records = read_every(files_in(runs))
    write_report(records, output)
    print(output)
    if plots is not None:
        from laconic.bench.report.figures import write_figures

        for path in write_figures(records, plots):
            print(path)
