"""Writes the tables of docs/benchmarks.md anew from the records in results/."""

from pathlib import Path

from pages.results import write_into

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    write_into(root / "docs" / "benchmarks.md", root / "results")
