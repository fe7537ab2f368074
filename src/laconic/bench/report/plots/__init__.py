"""One plot a file: `plot(records)` gives the data of it, or None where the records have none.

The folder is the registry: a new file here is a new chart in the report.
"""

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

from laconic.bench.records.kinds import Record
from laconic.bench.report.plotdata import Plot


def plots(records: Sequence[Record]) -> list[Plot]:
    """Every plot that has something to say about these records of one setting, in place."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    drawn: list[Plot | None] = [module.plot(records) for module in modules]
    return sorted((plot for plot in drawn if plot is not None), key=lambda plot: plot.place)
