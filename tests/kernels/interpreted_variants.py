"""Counts what Triton would compile on a card: launches that differ in more than numbers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.interpreter import InterpretedFunction

from gradwire import kernels
from gradwire.base import OneRound, take
from gradwire.bench.microbench.ef_step import ef_step
from gradwire.kernels import cuda, reference
from gradwire.spec import parse
from gradwire.types import Given, Parts, Turn
from gradwire.wire.layout import pack, unpack

SIZES = [27, 100, 1000, 4095, 5000, 36864, 65537, 147456, 262144, 1000003]
SHAPES = [(64, 147), (64, 576), (128, 64), (128, 1152), (256, 2304), (512, 4608), (1000, 512)]
"""Of layers, for methods that see matrices."""
STEPS = 6
RANKS = 8


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
    shapes = [(size,) for size in SIZES] if isinstance(compressor, OneRound) else SHAPES
    with patch.object(kernels, "at", lambda _: cuda), noted() as launches:
        for step in range(STEPS):
            for lane, shape in enumerate(shapes):
                turn = Turn(shape, size=RANKS, lane=lane, step=step)
                ef_step(compressor, torch.zeros(turn.numel), turn)()
            counts.append(len(launches))
    return counts


def decoded(spec: str) -> list[int]:
    """The same for the messages of all ranks: checked, and added up."""
    codec, counts = parse(spec), list[int]()
    assert isinstance(codec, OneRound)
    with patch.object(cuda, "index_fits", _fits), noted() as launches:
        for step in range(STEPS // 2):
            turns = [Turn((s,), size=RANKS, lane=i, step=step) for i, s in enumerate(SIZES[:6])]
            with patch.object(kernels, "at", lambda _: reference):
                buffers = [_buffer(codec, turns, rank) for rank in range(RANKS)]
            with patch.object(kernels, "at", lambda _: cuda):
                heard = [unpack(b, [codec.layout(turn.numel) for turn in turns]) for b in buffers]
                for turn, messages in zip(turns, zip(*heard, strict=True), strict=True):
                    codec.add_to(torch.zeros(turn.numel), messages, 1 / RANKS, turn)
            counts.append(len(launches))
    return counts


def _buffer(codec: OneRound, turns: list[Turn], rank: int) -> Tensor:
    """What a rank sends for a bucket of lanes: its parts begin anywhere."""

    def said(turn: Turn) -> Parts:
        dice = torch.Generator().manual_seed(1000 * turn.step + 10 * turn.lane + rank)
        x = torch.randn(turn.numel, generator=dice)
        return take(codec, Given(x), turn._replace(rank=rank))

    return pack([said(turn) for turn in turns], [codec.layout(turn.numel) for turn in turns])


_index_fits = cuda.index_fits


def _fits(packed: Tensor, low: int, bits: int, count: int, numel: int) -> Tensor:
    _index_fits(packed, low, bits, count, numel)
    return torch.tensor(True)
