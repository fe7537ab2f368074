"""Measures the size and the error of a method's messages when the site is built."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire.base import Compressor
from gradwire.errors import ConfigError
from gradwire.types import EncodeContext

SIDE = 256
SIZES = ((32, 32), (256, 256), (1024, 1024))
TURNS = 3
"""Messages over which an error is averaged, since some methods are random."""

SWEEPS: Mapping[str, Sequence[float]] = {
    "ratio": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "value": (1e-5, 1e-4, 1e-3, 1e-2),
    "bits": (1, 2, 3, 4, 5, 6, 7, 8),
    "rank": (1, 2, 4, 8, 16, 32),
    "k": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "bound": (2**-15, 2**-12, 2**-10, 2**-8),
    "sparsity": (1.0, 1.25, 1.5, 1.75, 1.9),
    "alpha": (0.5, 1.0, 1.5, 2.0, 4.0),
    "clip": (1.0, 1.5, 2.0, 2.5, 4.0, 8.0),
    "norm": (1, 2, 3, 4),
    "block": (16, 32, 64, 128, 256, 1024),
    "bucket": (64, 128, 256, 1024, 4096, 16384),
}
"""Values that pages plot, by the name of the parameter."""

LENGTHS = (64, 256, 1024, 4096, 16384, 65536)
"""Numbers of elements that pages plot for a method without such a parameter."""


class Size(NamedTuple):
    """The message of a tensor of normal entries."""

    shape: tuple[int, int]
    nbytes: int

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / math.prod(self.shape)


class Point(NamedTuple):
    """A setting, with the bits per element and the error of its message."""

    x: float
    bits: float
    error: float
    noise_error: float
    """The error on normal entries, in which there is nothing to find."""


class Sweep(NamedTuple):
    """A method along one axis."""

    axis: str
    points: tuple[Point, ...]


@cache
def gradient() -> Tensor:
    """Returns the gradient of a linear layer, 256 x 256, inside a small network; batches of 32."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Linear(SIDE, SIDE), nn.ReLU(), nn.Linear(SIDE, SIDE), nn.ReLU(), nn.Linear(SIDE, 10)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(SIDE))
    inputs = torch.randn(32, SIDE, generator=generator)
    targets = torch.randint(10, (32,), generator=generator)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    found = model[2].weight.grad
    assert isinstance(found, Tensor)
    return found


@cache
def noise(shape: tuple[int, int] = (SIDE, SIDE)) -> Tensor:
    """Returns normal entries with the gradient's mean square."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator) * float(gradient().square().mean().sqrt())


def sizes(codec: Compressor) -> list[Size]:
    """Returns the message sizes of tensors of a few shapes."""
    return [Size(shape, codec.encode(noise(shape)).nbytes) for shape in SIZES]


def formula(codec: Compressor) -> str | None:
    """Returns the bytes as a n + b (rows + columns), if that holds for a few large matrices."""
    small, large, between = 1 << 10, 1 << 12, 1 << 11
    # Two equations for a and b; a third shape, not square, must agree.
    first, second = (codec.nbytes((side, side)) / side for side in (small, large))
    area = (second - first) / (large - small)
    sides = (first - area * small) / 2
    if sides < 0.5:
        # Less than a number per row: a scale or two, which is negligible for a large tensor.
        area, sides = second / large, 0
    guess = area * large * between + sides * (large + between)
    if not math.isclose(guess, codec.nbytes((large, between)), rel_tol=1e-3):
        return None
    terms = [(area, f"{area:.4g} n"), (sides, f"{sides:.3g} (rows + columns)")]
    return " + ".join(term for factor, term in terms if factor > 1e-6)


def sweep(usual: Compressor) -> Sweep:
    """Measures the method along its main parameter: the first in `SWEEPS`, else the length."""
    settings = {f.name: getattr(usual, f.name) for f in fields(usual)}  # type: ignore[arg-type]
    names = [name for name in settings if name in SWEEPS]
    if not names:
        heads = [(n, gradient().view(-1)[:n], noise().view(-1)[:n]) for n in LENGTHS]
        return Sweep("elements", tuple(point(n, usual, own, other) for n, own, other in heads))
    codecs = [(x, legal(usual, {**settings, names[0]: x})) for x in SWEEPS[names[0]]]
    return Sweep(
        names[0], tuple(point(x, codec, gradient(), noise()) for x, codec in codecs if codec)
    )


def legal(usual: Compressor, settings: Mapping[str, object]) -> Compressor | None:
    """Returns the method with these settings, or None if it refuses them."""
    try:
        return type(usual)(**settings)
    except ConfigError:
        return None


def point(x: float, codec: Compressor, own: Tensor, other: Tensor) -> Point:
    bits = 8 * codec.encode(own).nbytes / own.numel()
    return Point(x, bits, error(codec, own), error(codec, other))


def error(codec: Compressor, x: Tensor) -> float:
    """Returns the RMS of |x - decoded| / |x|; votes have no scale, and get the best one."""
    squares = []
    for step in range(TURNS):
        decoded = codec.decode(codec.encode(x, EncodeContext(tuple(x.shape), step=step)))
        if codec.traits().is_vote:
            decoded = decoded * ((decoded * x).sum() / decoded.square().sum())
        squares.append(float((x - decoded).square().sum() / x.square().sum()))
    return math.sqrt(sum(squares) / TURNS)
