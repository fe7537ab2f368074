"""What Gradwire stands on: declared, ranged for users, pinned for development, and its licences.

`make audit` prints the list; `tests/test_dependencies.py` holds the package to the rules. Nothing
here asks the network: what is known of vulnerabilities is `make audit-online`'s to ask.
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
"""They come with torch's builds for GPUs, which pin them; the pins here are for CPUs."""

PERMISSIVE = re.compile(r"apache|\bbsd|\bmit\b|psf|python software|\bisc\b|mpl|mozilla", re.I)
"""Licences under which what we bring along may be used by anybody; MPL asks for its own files."""


class Package(NamedTuple):
    name: str
    version: str
    licence: str


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict[str, list[Requirement]]:
    """What pyproject.toml asks for: "" for everybody, extras by name, "build" to build it.

    Read by hand, since Python has no reader of TOML before 3.11.
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
    """The versions that development is held to."""
    lines = (ROOT / file).read_text().split()
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


def reached(wanted: Iterable[Requirement]) -> dict[str, Distribution]:
    """All that is installed because of these, and because of those in turn."""
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
    """In a few words, from whichever field has it."""
    meta = found.metadata
    named = [c.split(" :: ")[-1] for c in meta.get_all("Classifier") or [] if "License ::" in c]
    text = meta.get("License-Expression") or ", ".join(named) or meta.get("License") or "unknown"
    return " ".join(text.split())[:60]


def installed_extras() -> list[str]:
    """Those that the Makefile installs for everything but test-tf."""
    match = re.search(r"--editable '\.\[(bench.*?)\]'", (ROOT / "Makefile").read_text())
    assert match is not None, "the Makefile is not as expected"
    return match[1].split(",")


def packages() -> list[Package]:
    """All that a checkout stands on, without what is built with a GPU's torch."""
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
