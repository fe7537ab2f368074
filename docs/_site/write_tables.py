"""Regenerates the tables of the wire format, from the classes, and of results, from records.

The README's table of results is one of them.
"""

from pathlib import Path

from gradwire import kernels
from pages import readme_results, study_pages, wire

if __name__ == "__main__":
    # Reference kernels need no compiler: quick to start, and the same everywhere.
    kernels.use("reference")
    root = Path(__file__).parents[2]
    wire.write_into(root / "docs" / "reference" / "wire.md")
    study_pages.write(root / "docs" / "results", root / "results")
    readme_results.write_into(root / "README.md", root / "results")
