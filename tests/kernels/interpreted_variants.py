"""Counts what Triton would compile on a card: launches that differ in more than numbers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.interpreter import InterpretedFunction

from laconic import kernels
from laconic.bench.costs.ef_step import ef_step
from laconic.kernels import cuda
from laconic.spec import parse
from laconic.types import Turn

SIZES = [27, 100, 1000, 4095, 5000, 36864, 65537, 147456, 262144, 1000003]
STEPS = 6


@contextmanager
def noted() -> Iterator[set[tuple[object, ...]]]:
    """Every launch by what it is compiled for; nothing is run."""
    launches: set[tuple[object, ...]] = set()

    def note(kernel: InterpretedFunction, *args: object, grid: object, **named: object) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        plain = set(kernel.kwargs["do_not_specialize"] or ())
        kinds = kernel.fn.__annotations__

        def seen(name: str) -> object:
            if name in kinds or name not in kernel.arg_names:
                return given[name]
            special = name not in plain
            return native_specialize_impl(BaseBackend, given[name], False, special, True)

        what = tuple((name, seen(name)) for name in sorted(given) if name != "warmup")
        launches.add((kernel.fn.__module__, kernel.fn.__name__, *what))

    with patch.object(InterpretedFunction, "run", note):
        yield launches


def variants(spec: str) -> list[int]:
    """How many kernels steps with error feedback need, after each of some steps."""
    compressor, counts = parse(spec), list[int]()
    with patch.object(kernels, "at", lambda _: cuda), noted() as launches:
        for step in range(STEPS):
            for lane, size in enumerate(SIZES):
                turn = Turn((size,), size=8, lane=lane, step=step)
                ef_step(compressor, torch.zeros(size), turn)()
            counts.append(len(launches))
    return counts
