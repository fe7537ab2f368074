"""Regenerates the tables of docs/wire.md (from the classes) and docs/benchmarks.md (records)."""

from pathlib import Path

from pages import results, wire

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    wire.write_into(root / "docs" / "wire.md")
    results.write_into(root / "docs" / "benchmarks.md", root / "results")
