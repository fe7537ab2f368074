"""Compiles what methods launch for a card that need not be there: an H100's or H200's."""

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
from gradwire.kernels.specs import Drifted, ThresholdSpec
from gradwire.spec import parse
from gradwire.types import EFInput, EncodeContext

HOPPER = GPUTarget("cuda", 90, 32)
SIZE = 1_000_003
SHAPE = 256, 2304
RANKS = 8


@contextmanager
def compiling() -> Iterator[list[str]]:
    """The names of all kernels that are launched; each is compiled, and none is run."""
    names: list[str] = []

    def build(kernel: JITFunction, *args: object, grid: object, **named: object) -> None:
        own = [parameter.name for parameter in kernel.params]
        ef = dict(zip(own, args, strict=False)) | {n: v for n, v in named.items() if n in own}
        options = {n: v for n, v in named.items() if n not in own and n != "warmup"}
        compile_kernel(_source(kernel, ef), target=HOPPER, options=options)
        names.append(kernel.fn.__name__)

    # As on that card, which sets up the next kernel while one still runs.
    with (
        patch.object(dependent_launch, "_can", lambda _: True),
        patch.object(JITFunction, "run", build),
    ):
        yield names


def _source(kernel: JITFunction, ef: dict[str, object]) -> ASTSource:
    """A kernel with the types of its arguments, as a launch would see them."""
    types: dict[str, str] = {}
    constants: dict[tuple[int], object] = {}
    facts: dict[tuple[int], list[list[object]]] = {}
    for place, parameter in enumerate(kernel.params):
        value = ef[parameter.name]
        kind, key = "constexpr", value
        if not parameter.is_constexpr:
            special = not parameter.do_not_specialize
            kind, key = native_specialize_impl(BaseBackend, value, False, special, True)
        types[parameter.name] = kind
        if kind == "constexpr":
            constants[place,] = key
        elif key == "D":
            facts[place,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, types, constants, facts)


def compiled(spec: str) -> list[str]:
    """The kernels of a step with error feedback and, where messages are added up, of eight."""
    method = parse(spec)
    ctx = EncodeContext((SIZE,) if isinstance(method, OneRound) else SHAPE, world_size=RANKS)
    with patch.object(kernels, "at", lambda _: cuda), compiling() as names:
        ef_step(method, torch.zeros(ctx.numel), ctx)()
    if isinstance(method, OneRound):
        with patch.object(kernels, "at", lambda _: reference):
            said = encode_with_feedback(method, EFInput(torch.randn(SIZE)), ctx)
        with patch.object(kernels, "at", lambda _: cuda), compiling() as more:
            method.decode_add(torch.zeros(SIZE), [said] * RANKS, 1 / RANKS, ctx)
        names += more
    return names


def large(spec: str) -> list[str]:
    """The kernels of a step with error feedback, as if a tensor were large."""
    ctx = EncodeContext((SIZE,), world_size=RANKS)
    small = patch.object(passes, "PROGRAMS", 16), patch.object(sampled_bounds, "LARGE", 0)
    with patch.object(kernels, "at", lambda _: cuda), small[0], small[1], compiling() as names:
        ef_step(parse(spec), torch.zeros(SIZE), ctx)()
    return names


def positions() -> list[str]:
    """The kernels for positions alone, of which the host asks how many there are."""
    # Memory of zeros, since nothing is run that would write the number.
    with patch.object(torch, "empty", torch.zeros), compiling() as names:
        cuda.passing(EFInput(torch.randn(SIZE)), ThresholdSpec("bisected", wanted=100))
        cuda.passing(EFInput(torch.randn(SIZE)), ThresholdSpec("fixed", border=1.0))
    return names


def drifts() -> list[str]:
    """The kernels of what drifts, of parameters in two types, with and without a step back."""
    with patch.object(drift, "LARGE", SIZE), compiling() as names:
        for dtype in (torch.float32, torch.bfloat16):
            rest = [[torch.zeros(SIZE)] for _ in range(3)]
            ef = Drifted([torch.zeros(SIZE, dtype=dtype)], *rest)
            cuda.arrive(ef, 1.0)
            cuda.depart(ef, 1.0)
            for ahead in (1.0, 0.5):
                cuda.relay(ef, 1.0, ahead)
    return names
