"""Numba decorators: nogil, cached on disk, with a log line when a function is compiled."""

import logging
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import event

from gradwire.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("gradwire.kernels")

# One first call at a time: two threads would announce what only one of them compiles.
_first = Lock()


class _Announcer(event.Listener):
    """Says what is being compiled; what comes from the disk is quick, and passes in silence."""

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        # Numba compiles functions of its own on the way, which say nothing to a user.
        if not function.__module__.startswith("numba."):
            # A warning, since that is what users see without setting up a log.
            log.warning(
                "gradwire: compiling %s for this CPU, about a second, kept on disk for the next run",
                function.__name__,
            )

    def on_end(self, event: Any) -> None:
        pass


def _cached(function: Callable[P, R], **options: Any) -> Any:
    """Numba's function, not compiled yet; its cache must have a folder that can be written."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy", **options)(function)
    except RuntimeError as error:
        raise ConfigError(
            "kernels: Numba finds no folder to keep compiled code in, neither beside the package "
            "nor in the user's cache: set NUMBA_CACHE_DIR to one that can be written, or call "
            f"gradwire.kernels.use('reference') ({error})"
        ) from error


def _compiled(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    fast = _cached(function, **options)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # Its list of signatures would be made anew, which takes longer than many a call.
        if fast.overloads:
            return cast(R, fast(*args, **kwargs))
        with _first:
            if not fast.overloads:
                with event.install_listener("numba:compile", _Announcer()):
                    return cast(R, fast(*args, **kwargs))
        return cast(R, fast(*args, **kwargs))

    return call


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles on first use; the log says so, since that takes about a second."""
    return _compiled(function)


def compiled_sums(function: Callable[P, R]) -> Callable[P, R]:
    """The same for loops whose sums may be taken in any order: many at once, always alike."""
    return _compiled(function, fastmath={"reassoc"})


# Loops that call each other must see the compiled function itself.
inlined = partial(_cached, inline="always")

# Loops with arguments of their own, called by compiled ones.
called = partial(_cached)

# Sums in whatever order is fastest: that is all the licence they have.
summing = partial(_cached, fastmath={"reassoc"})
