"""Starts the command line, or names the extra that it needs."""

import sys
from importlib.util import find_spec

from gradwire.errors import MissingExtra


def main() -> None:
    for package in ("typer", "rich"):
        if find_spec(package) is None:
            sys.exit(f"gradwire: {MissingExtra('the command line', package, 'bench')}")
    from gradwire.cli import run

    run()


if __name__ == "__main__":
    main()
