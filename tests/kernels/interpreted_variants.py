"""Counts the kernels that Triton would compile on a GPU: one for each specialisation."""

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
from gradwire.base import OneRound, encode_with_feedback
from gradwire.bench.microbench.ef_step import ef_step
from gradwire.kernels import cuda, reference
from gradwire.spec import parse
from gradwire.types import EFInput, EncodeContext, Parts
from gradwire.wire.layout import pack, unpack

SIZES = [27, 100, 1000, 4095, 5000, 36864, 65537, 147456, 262144, 1000003]
SHAPES = [(64, 147), (64, 576), (128, 64), (128, 1152), (256, 2304), (512, 4608), (1000, 512)]
"""Shapes of layers, for methods that compress matrices."""
STEPS = 6
RANKS = 8


@contextmanager
def recorded_launches() -> Iterator[set[tuple[object, ...]]]:
    """Yields the set of launches by what they are compiled for; nothing is run."""
    launches: set[tuple[object, ...]] = set()

    def record(kernel: InterpretedFunction, *args: object, grid: object, **named: object) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | named
        plain = set(kernel.kwargs["do_not_specialize"] or ())
        kinds = kernel.fn.__annotations__

        def specialization(name: str) -> object:
            if name in kinds or name not in kernel.arg_names:
                return arguments[name]
            specialize = name not in plain
            return native_specialize_impl(BaseBackend, arguments[name], False, specialize, True)

        key = tuple((name, specialization(name)) for name in sorted(arguments) if name != "warmup")
        launches.add((kernel.fn.__module__, kernel.fn.__name__, *key))

    with patch.object(InterpretedFunction, "run", record):
        yield launches


def variants(spec: str) -> list[int]:
    """Returns the number of kernels that error-feedback steps need, after each of some steps."""
    compressor, counts = parse(spec), list[int]()
    shapes = [(size,) for size in SIZES] if isinstance(compressor, OneRound) else SHAPES
    with patch.object(kernels, "on", lambda _: cuda), recorded_launches() as launches:
        for step in range(STEPS):
            for lane, shape in enumerate(shapes):
                ctx = EncodeContext(shape, world_size=RANKS, lane_id=lane, step=step)
                ef_step(compressor, torch.zeros(ctx.numel), ctx)()
            counts.append(len(launches))
    return counts


def decoded(spec: str) -> list[int]:
    """Returns the number of kernels that check and decode the messages of all ranks."""
    codec, counts = parse(spec), list[int]()
    assert isinstance(codec, OneRound)
    with patch.object(cuda, "index_fits", _fits), recorded_launches() as launches:
        for step in range(STEPS // 2):
            contexts = [
                EncodeContext((s,), world_size=RANKS, lane_id=i, step=step)
                for i, s in enumerate(SIZES[:6])
            ]
            with patch.object(kernels, "on", lambda _: reference):
                buffers = [_buffer(codec, contexts, rank) for rank in range(RANKS)]
            with patch.object(kernels, "on", lambda _: cuda):
                received = [
                    unpack(b, [codec.layout(ctx.numel) for ctx in contexts]) for b in buffers
                ]
                for ctx, messages in zip(contexts, zip(*received, strict=True), strict=True):
                    codec.decode_add(torch.zeros(ctx.numel), messages, 1 / RANKS, ctx)
            counts.append(len(launches))
    return counts


def _buffer(codec: OneRound, contexts: list[EncodeContext], rank: int) -> Tensor:
    """Returns the buffer a rank sends for a bucket of lanes: its parts have any alignment."""

    def message(ctx: EncodeContext) -> Parts:
        generator = torch.Generator().manual_seed(1000 * ctx.step + 10 * ctx.lane_id + rank)
        x = torch.randn(ctx.numel, generator=generator)
        return encode_with_feedback(codec, EFInput(x), ctx._replace(rank=rank))

    return pack([message(ctx) for ctx in contexts], [codec.layout(ctx.numel) for ctx in contexts])


_index_fits = cuda.index_fits


def _fits(packed: Tensor, low: int, bits: int, count: int, numel: int) -> Tensor:
    _index_fits(packed, low, bits, count, numel)
    return torch.tensor(True)
