"""The names of the package: imported when used, and the same for type checkers."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire
from deadlines import scaled

SOURCE = Path(gradwire.__file__).parent

LAZY = """
import sys, gradwire, gradwire.cli
from gradwire.errors import ConfigError
print([name for name in ("torch", "numpy", "numba") if name in sys.modules])
from gradwire import *
print(attach.__module__, "torch" in sys.modules)
"""


def test_torch_is_imported_only_when_a_name_needs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAZY],
        capture_output=True,
        text=True,
        timeout=scaled(50),
        check=True,
    )
    assert done.stdout.splitlines() == ["[]", "gradwire.integrations.ddp True"]


def test_type_checkers_and_programs_see_the_same_names() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name: module for name, module in typed.items() if module != "gradwire"} == dict(
        gradwire._MODULES
    )
    assert sorted(typed) == sorted(gradwire.__all__)


def test_no_module_hides_a_public_name() -> None:
    """Importing a module sets it as an attribute of the package, in place of a lazy name."""
    modules = {path.stem for path in SOURCE.iterdir()}
    assert not modules & gradwire._MODULES.keys()


@pytest.mark.parametrize("name", ["ConfigError", "TopK", "simulate", "Autopilot"])
def test_public_names_can_be_pickled(name: str) -> None:
    item = getattr(gradwire, name)
    assert pickle.loads(pickle.dumps(item)) is item
