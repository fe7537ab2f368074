"""Numba decorators: nogil, cached on disk, with one log line when functions are compiled."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import numba
import torch.distributed as dist
from numba.core import event

from gradwire.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("gradwire.kernels")

_functions: set[Callable[..., Any]] = set()
"""The functions that are decorated here, as Python functions."""


class _CompileListener(event.Listener):
    """Logs once, on rank 0, that kernels are compiled; loading them from disk is not logged."""

    def __init__(self) -> None:
        # Numba's listeners keep no state of their own that would have to be set up.
        self._announced = False

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        # Numba reports its own functions, too, and those of the user.
        if function not in _functions:
            return
        log.debug("gradwire: compiling %s for this CPU", function.__name__)
        if not self._announced and _is_first_rank():
            self._announced = True
            # A warning, since that is what users see without setting up a log.
            log.warning(
                "gradwire: compiling kernels for this CPU at their first use, about a second each, "
                "cached on disk for next time"
            )

    def on_end(self, event: Any) -> None:
        pass


def _is_first_rank() -> bool:
    """Returns whether this process has rank 0, or is no rank of a process group."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


# Compilation holds Numba's global lock, so only one of several threads compiles and logs.
_listener = _CompileListener()
cast(Any, event).register("numba:compile", _listener)


def _compiled(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    """Returns Numba's dispatcher, which compiles at the first call.

    Raises ConfigError if Numba finds no folder for its cache that can be written.
    """
    try:
        dispatcher = numba.njit(nogil=True, cache=True, error_model="numpy", **options)(function)
    except RuntimeError as error:
        raise ConfigError(
            "kernels: Numba finds no folder to keep compiled code in, neither beside the package "
            "nor in the user's cache: set NUMBA_CACHE_DIR to one that can be written, or call "
            f"gradwire.kernels.use('reference') ({error})"
        ) from error
    _functions.add(function)
    return cast(Callable[P, R], dispatcher)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function at its first call; other compiled functions can call it."""
    return _compiled(function)


def compiled_sums(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function whose sums may be reordered (deterministically) to be vectorized."""
    return _compiled(function, fastmath={"reassoc"})


# Inlined into the loops that call it, before their types are inferred.
inlined = partial(_compiled, inline="always")
