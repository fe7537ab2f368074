"""How our loops are compiled: without the GIL, cached on disk, with a word when it takes time."""

import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("laconic.kernels")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles on first use; the log says so, since that takes about a second."""
    return _announced(function, numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def compiled_sums(function: Callable[P, R]) -> Callable[P, R]:
    """The same for sums that may be taken in any order, as vector instructions do."""
    fast = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc"})
    return _announced(function, fast(function))


def _announced(function: Callable[P, R], fast: Any) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not fast.signatures:
            log.info("compiling %s for this CPU (cached for the next run)", function.__name__)
        return cast(R, fast(*args, **kwargs))

    return call


# Loops that call each other must see the compiled function itself.
inlined = numba.njit(nogil=True, cache=True, error_model="numpy", inline="always")
