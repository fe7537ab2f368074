"""Kernels: the loops over memory, one interface for every device.

`reference` defines every function in torch, `cpu` implements it in Numba and `cuda` in Triton.
Compressors call `on(x.device).name(...)`, which picks the backend by device; `use` pins one backend
for the whole process. A backend package collects the kernels from its modules when it is imported,
which happens at its first use.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, TypeAlias, cast, get_args

import torch

from gradwire.errors import ConfigError, MissingExtra
from gradwire.kernels.protocol import Kernels

__all__ = ["Backend", "Kernels", "backend_for", "on", "use"]

Backend: TypeAlias = Literal["auto", "reference", "numba", "triton"]

# Backend: the device that it runs on, and the extra that installs it.
_COMPILED = {"numba": ("cpu", "cpu"), "triton": ("cuda", "cuda")}

_FOLDERS = {"numba": "cpu", "triton": "cuda", "reference": "reference"}

_pinned: Backend = "auto"


def use(backend: Backend) -> None:
    """Pins the backend for this process; "auto" goes back to choosing by device."""
    global _pinned  # noqa: PLW0603 - one process-wide switch, set by hand
    known = get_args(Backend)
    if backend not in known:
        raise ConfigError(f"kernels: backend must be one of {[*known]}, got {backend!r}")
    if backend in _COMPILED and find_spec(backend) is None:
        raise MissingExtra(f"backend {backend!r}", backend, _COMPILED[backend][1])
    _pinned = backend
    on.cache_clear()


def backend_for(device: torch.device) -> str:
    """Returns the name of the backend that `on` picks for this device."""
    if _pinned in _COMPILED and device.type != _COMPILED[_pinned][0]:
        needs = _COMPILED[_pinned][0]
        raise ConfigError(f"kernels: backend {_pinned!r} runs on {needs}, got a tensor on {device}")
    if _pinned != "auto":
        return _pinned
    for backend, (kind, _) in _COMPILED.items():
        if device.type == kind and find_spec(backend) is not None:
            return backend
    return "reference"


@cache
def on(device: torch.device) -> Kernels:
    """Returns the kernels of a device; raises ConfigError if they cannot be compiled."""
    backend = backend_for(device)
    if backend == "triton":
        import_module("gradwire.kernels.cuda.device_check").check_device(device)
    return cast(Kernels, import_module(f"gradwire.kernels.{_FOLDERS[backend]}"))
