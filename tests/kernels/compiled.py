"""Compiles the kernels of methods for a GPU that need not be present: an H100 or H200."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from triton import compile as compile_kernel
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from gradwire import kernels
from gradwire.base import OneRound, encode_with_feedback
from gradwire.bench.microbench.ef_step import ef_step
from gradwire.kernels import cuda, reference
from gradwire.kernels.cuda import drift
from gradwire.kernels.cuda.threshold import dependent_launch, passes, sampled_bounds
from gradwire.kernels.specs import DriftTensors, ThresholdSpec
from gradwire.spec import parse
from gradwire.types import EFInput, EncodeContext

HOPPER = GPUTarget("cuda", 90, 32)
SIZE = 1_000_003
SHAPE = 256, 2304
RANKS = 8


@contextmanager
def compiling() -> Iterator[list[str]]:
    """Yields the names of all launched kernels; each is compiled, and none is run."""
    names: list[str] = []

    def build(kernel: JITFunction, *args: object, grid: object, **named: object) -> None:
        parameters = [parameter.name for parameter in kernel.params]
        arguments = dict(zip(parameters, args, strict=False)) | {
            n: v for n, v in named.items() if n in parameters
        }
        options = {n: v for n, v in named.items() if n not in parameters and n != "warmup"}
        compile_kernel(_source(kernel, arguments), target=HOPPER, options=options)
        names.append(kernel.fn.__name__)

    # As on that GPU, which supports programmatic dependent launch.
    with (
        patch.object(dependent_launch, "_supports_pdl", lambda _: True),
        patch.object(JITFunction, "run", build),
    ):
        yield names


def _source(kernel: JITFunction, arguments: dict[str, object]) -> ASTSource:
    """Returns a kernel with the types of its arguments, as a launch would specialise it."""
    types: dict[str, str] = {}
    constants: dict[tuple[int], object] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for position, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        kind, key = "constexpr", value
        if not parameter.is_constexpr:
            specialize = not parameter.do_not_specialize
            kind, key = native_specialize_impl(BaseBackend, value, False, specialize, True)
        types[parameter.name] = kind
        if kind == "constexpr":
            constants[position,] = key
        elif key == "D":
            attributes[position,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, types, constants, attributes)


def compiled(spec: str) -> list[str]:
    """Returns the kernels of a step with error feedback and of decoding eight messages."""
    method = parse(spec)
    ctx = EncodeContext((SIZE,) if isinstance(method, OneRound) else SHAPE, world_size=RANKS)
    with patch.object(kernels, "on", lambda _: cuda), compiling() as names:
        ef_step(method, torch.zeros(ctx.numel), ctx)()
    if isinstance(method, OneRound):
        with patch.object(kernels, "on", lambda _: reference):
            message = encode_with_feedback(method, EFInput(torch.randn(SIZE)), ctx)
        with patch.object(kernels, "on", lambda _: cuda), compiling() as more:
            method.decode_add(torch.zeros(SIZE), [message] * RANKS, 1 / RANKS, ctx)
        names += more
    return names


def large(spec: str) -> list[str]:
    """Returns the kernels of a step with error feedback, as if the tensor were large."""
    ctx = EncodeContext((SIZE,), world_size=RANKS)
    small = patch.object(passes, "PROGRAMS", 16), patch.object(sampled_bounds, "LARGE", 0)
    with patch.object(kernels, "on", lambda _: cuda), small[0], small[1], compiling() as names:
        ef_step(parse(spec), torch.zeros(SIZE), ctx)()
    return names


def positions() -> list[str]:
    """Returns the kernels that select positions only, which need their number on the host."""
    # Zeros, since no kernel runs that would write the count.
    with patch.object(torch, "empty", torch.zeros), compiling() as names:
        cuda.select_by_threshold(
            EFInput(torch.randn(SIZE)), ThresholdSpec("bisected", target_count=100)
        )
        cuda.select_by_threshold(EFInput(torch.randn(SIZE)), ThresholdSpec("fixed", threshold=1.0))
    return names


def drifts() -> list[str]:
    """Returns the drift kernels, for parameters of two types, with and without undoing a part."""
    with patch.object(drift, "LARGE", SIZE), compiling() as names:
        for dtype in (torch.float32, torch.bfloat16):
            rest = [[torch.zeros(SIZE)] for _ in range(3)]
            drifted = DriftTensors([torch.zeros(SIZE, dtype=dtype)], *rest)
            cuda.apply_outer_mean(drifted, 1.0)
            cuda.capture_drift(drifted, 1.0)
            for ahead in (1.0, 0.5):
                cuda.apply_and_capture(drifted, 1.0, ahead)
    return names
