"""Runs jobs by name, so that the test process need not import TensorFlow, which takes seconds."""

from importlib import import_module
from typing import Any

from processes import Ranks


def call(module: str, name: str, args: tuple[object, ...]) -> Any:
    return getattr(import_module(module), name)(*args)


class NamedJobs:
    """Runs the jobs of a module, by name."""

    def __init__(self, ranks: Ranks, module: str) -> None:
        self._ranks, self._module = ranks, module

    def run(self, name: str, *args: object) -> list[Any]:
        return self._ranks.run(call, self._module, name, args)
