"""Dependencies are few, declared, ranged for users, pinned for development, and permissive."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from audit import PERMISSIVE, normal, packages, pins, project, reached

SOURCE = Path(__file__).parents[1] / "src" / "gradwire"

BUNDLED = {
    "llvmlite": "numba",
    "keras": "tensorflow-cpu",
    "tensorflow": "tensorflow-cpu",
    "typing_extensions": "torch",
}
"""Modules that a declared package installs, in the version that it needs."""


def imported() -> Iterator[tuple[str, Path]]:
    """Yields the external modules that the source imports, and the file."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                root = name.partition(".")[0]
                if root not in {*sys.stdlib_module_names, "gradwire"}:
                    yield root, file


def test_all_imported_packages_are_declared() -> None:
    wanted = project()
    users = {normal(r.name) for part, rs in wanted.items() if part != "dev" for r in rs}
    found = list(imported())
    assert {"torch", "numba"} <= {name for name, _ in found}
    assert not [(n, f.name) for n, f in found if normal(BUNDLED.get(n, n)) not in users]


def test_users_need_two_packages() -> None:
    assert sorted(r.name for r in project()[""]) == ["numpy", "torch"]


def test_users_get_ranges_and_no_pins() -> None:
    requirements = [r for part in project().values() for r in part]
    assert len(requirements) > 10
    assert all(">=" in {s.operator for s in r.specifier} <= {">=", "<"} for r in requirements)


def test_all_packages_are_pinned_for_development() -> None:
    # TensorFlow's packages are only installed by make test-tf.
    held, here = {**pins(), **pins("constraints-tf.txt")}, packages()
    assert len(here) > 20
    assert not [p for p in here if held.get(p.name) != p.version]


def test_every_pinned_package_is_required() -> None:
    used = reached(r for part in project().values() for r in part)
    assert not pins().keys() - used.keys()


def test_ranges_include_the_pinned_versions() -> None:
    held = pins()
    requirements = {r for part in project().values() for r in part}
    tried = [r for r in requirements if normal(r.name) in held]
    assert len(tried) > 10
    assert not [str(r) for r in tried if held[normal(r.name)] not in r.specifier]


def test_licences_are_permissive() -> None:
    assert not [package for package in packages() if not PERMISSIVE.search(package.licence)]
