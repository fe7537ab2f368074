"""Collection of a backend's kernels from its modules, checked against the protocol."""

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import isfunction
from pkgutil import walk_packages
from sys import modules
from types import MappingProxyType

from gradwire.kernels.protocol import Kernels

Kernel = Callable[..., object]

NAMES = frozenset(name for name in vars(Kernels) if not name.startswith("_"))
"""The names of all kernels."""


def collect(
    package: str, declared: Mapping[str, Kernel] = MappingProxyType({})
) -> dict[str, Kernel]:
    """Returns the kernels of the backend in this package, by name.

    A kernel is a function that a module of the package defines under a name of the protocol.
    Those that the backend takes from elsewhere, or composes, have to be `declared`. Raises
    RuntimeError unless every kernel is found exactly once: a misspelt one never falls back.
    """
    found, sources = dict(declared), dict.fromkeys(declared, f"{package} (declared)")
    for info in walk_packages(modules[package].__path__, f"{package}."):
        for name, value in vars(import_module(info.name)).items():
            # A module that uses a kernel of another one has the name, too.
            if name not in NAMES or not isfunction(value) or value.__module__ != info.name:
                continue
            if name in found:
                raise RuntimeError(
                    f"kernel {name!r} is defined twice: in {sources[name]} and in {info.name}"
                )
            found[name], sources[name] = value, info.name
    if missing := sorted(NAMES - found.keys()):
        raise RuntimeError(f"{package} has no kernel {missing}: neither defined nor declared")
    if unknown := sorted(found.keys() - NAMES):
        raise RuntimeError(f"{package} declares {unknown}, which the protocol does not name")
    return found
