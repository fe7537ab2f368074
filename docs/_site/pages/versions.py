"""Generates tables of versions: what the package allows, and what its tests run with."""

import re
from importlib.metadata import metadata
from pathlib import Path

from pages.markdown import code, table

MATRIX = re.compile(r'- \{ python: "([\d.]+)", torch: "([\d.]+)" \}')
REQUIREMENT = re.compile(r"^([\w.-]+)([^;]*?)(?:;\s*extra == ['\"]([\w-]+)['\"])?$")
DEVELOPMENT = ("dev", "docs")
"""Extras of those who work on Gradwire itself."""


def page(root: Path) -> str:
    """Returns a table of packages, and one of the versions of Python and torch in the matrix."""
    return f"{_packages(root)}\n\n## Python and torch\n\n{_matrix(root)}"


def _packages(root: Path) -> str:
    files = [root / f"constraints{name}.txt" for name in ("", "-tf", "-logging")]
    pins = dict(pin for path in files for pin in _pins(path))
    lines = [("Python", metadata("gradwire")["Requires-Python"], "", "always")]
    uses: dict[tuple[str, str], list[str]] = {}
    for name, allowed, extra in _requirements():
        if extra not in DEVELOPMENT:
            uses.setdefault((name, allowed), []).append(code(extra) if extra else "always")
    for (name, allowed), extras in uses.items():
        lines.append((name, allowed, pins.get(_normal(name), ""), ", ".join(extras)))
    return table(("package", "allowed", "tested", "needed by"), lines, words=4)


def _requirements() -> list[tuple[str, str, str]]:
    """Returns name, allowed versions and extra of everything that the package depends on."""
    found = [REQUIREMENT.match(text) for text in metadata("gradwire").get_all("Requires-Dist", [])]
    return [(m[1], m[2].strip(), m[3] or "") for m in found if m is not None]


def _pins(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text("utf-8").splitlines()
    pins = [line.partition("==") for line in lines if "==" in line and line[0] != "#"]
    return [(_normal(name), version.partition(";")[0].strip()) for name, _, version in pins]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip().lower())


def _matrix(root: Path) -> str:
    """Returns the pairs of versions for which the workflow runs the fast tests."""
    pairs = MATRIX.findall((root / ".github/workflows/checks.yml").read_text("utf-8"))
    by_python: dict[str, list[str]] = {}
    for python, torch in pairs:
        by_python.setdefault(python, []).append(torch)
    lines = [(python, ", ".join(versions)) for python, versions in by_python.items()]
    return table(("Python", "torch"), lines, words=2)
