"""The dependencies of Gradwire: declared requirements, pinned versions, and licences.

`make audit` prints the list; `tests/test_dependencies.py` checks the rules. Nothing here uses the
network: `make audit-online` looks for known vulnerabilities.
"""

import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
GPU_LIBRARIES = ("nvidia-", "cuda-")
"""Prefixes of packages that torch's GPU builds pin themselves; the pins here are for CPUs."""

PERMISSIVE = re.compile(r"apache|\b0?bsd|\bmit\b|psf|python software|\bisc\b|mpl|mozilla", re.I)
"""Licences that allow any use; MPL only covers changes to its own files."""


class Package(NamedTuple):
    name: str
    version: str
    licence: str


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict[str, list[Requirement]]:
    """Reads the requirements of pyproject.toml: "" for all users, extras by name, and "build".

    Uses regular expressions, since Python has no TOML reader before 3.11.
    """
    text = (ROOT / "pyproject.toml").read_text()
    found: dict[str, list[Requirement]] = {}
    for key, name in (("dependencies", ""), ("requires", "build")):
        found[name] = _listed(re.search(rf"^{key} = \[(.*?)\]", text, re.M | re.S))
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    for extra in re.finditer(r"^(\w+) = \[(.*?)\]", section, re.M | re.S):
        found[extra[1]] = _listed(extra, 2)
    return found


def _listed(match: re.Match[str] | None, group: int = 1) -> list[Requirement]:
    assert match is not None, "pyproject.toml is not as expected"
    return [Requirement(text) for text in re.findall(r'"([^"]+)"', match[group])]


def pins(file: str = "constraints.txt") -> dict[str, str]:
    """Returns the versions that are pinned for development."""
    lines = (ROOT / file).read_text().split()
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


def reached(wanted: Iterable[Requirement]) -> dict[str, Distribution]:
    """Returns the installed packages that these requirements lead to, directly or not."""
    found: dict[str, Distribution] = {}
    waiting = [(r, r.extras) for r in wanted]
    while waiting:
        requirement, extras = waiting.pop()
        name = normal(requirement.name)
        if name in found and not extras:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        for text in found[name].requires or []:
            more = Requirement(text)
            here = more.marker is None or any(
                more.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            )
            if here and not (normal(more.name) in found and not more.extras):
                waiting.append((more, more.extras))
    return found


def licence(found: Distribution) -> str:
    """Returns a short form of the licence, from the first metadata field that has it."""
    meta = found.metadata
    named = [c.split(" :: ")[-1] for c in meta.get_all("Classifier") or [] if "License ::" in c]
    text = meta.get("License-Expression") or ", ".join(named) or meta.get("License") or "unknown"
    return " ".join(text.split())[:60]


def installed_extras() -> list[str]:
    """Returns the extras that the Makefile installs for everything but test-tf and test-torchft."""
    match = re.search(r"--editable '\.\[(bench,.*?)\]'", (ROOT / "Makefile").read_text())
    assert match is not None, "the Makefile is not as expected"
    return match[1].split(",")


def packages() -> list[Package]:
    """Returns all packages that a checkout depends on, without those of torch's GPU builds."""
    wanted = project()
    found = reached(r for part in ("", *installed_extras()) for r in wanted[part])
    return [
        Package(name, found[name].version.split("+")[0], licence(found[name]))
        for name in sorted(found)
        if not name.startswith(GPU_LIBRARIES)
    ]


if __name__ == "__main__":
    held = pins()
    bad = [p for p in packages() if held.get(p.name) != p.version]
    for package in packages():
        print(f"{package.name:24} {package.version:16} {package.licence}")
    for package in bad:
        print(f"not pinned: {package.name} {package.version}", file=sys.stderr)
    sys.exit(1 if bad else 0)
