"""Runs example scripts as functions, on ranks that already exist."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from processes import as_torchrun

FOLDER = Path(__file__).parents[2] / "examples"


def run_example(name: str, *args: object) -> Any:
    """Returns the result of an example's `train` on this rank."""
    spec = spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(*args)


def run_example_as_torchrun(name: str, *args: object) -> Any:
    """Does the same with torchrun's environment, which some trainers read."""
    as_torchrun()
    return run_example(name, *args)
