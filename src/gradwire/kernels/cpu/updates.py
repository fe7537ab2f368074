"""Updates of optimisers in one pass over memory (definition: kernels/reference/updates.py)."""

from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.jit import compiled
from gradwire.kernels.cpu.threads import in_slices
from gradwire.kernels.specs import AdamSpec, Moments

Floats = NDArray[np.float32]


BLOCK = 2048
"""Entries that stay in the cache between the loops over them."""


@compiled
def _adam(
    grad: Floats,
    mean: Floats,
    square: Floats,
    mean_out: Floats,
    square_out: Floats,
    weight1: np.float32,
    beta2: np.float32,
    weight2: np.float32,
    square_factor: np.float32,
    mean_factor: np.float32,
    scaled_eps: np.float32,
    start: int,
    stop: int,
) -> None:
    # Loops become vectors only if few arrays might overlap, and indices are not negative: so there
    # are two loops, each over parts of arrays.
    for first in range(start, stop, BLOCK):
        last = min(first + BLOCK, stop)
        _moments(
            grad[first:last],
            mean[first:last],
            square[first:last],
            mean_out[first:last],
            square_out[first:last],
            weight1,
            beta2,
            weight2,
        )
        _quotient(
            grad[first:last],
            mean_out[first:last],
            square_out[first:last],
            square_factor,
            mean_factor,
            scaled_eps,
        )


@compiled
def _moments(
    grad: Floats,
    mean: Floats,
    square: Floats,
    mean_out: Floats,
    square_out: Floats,
    weight1: np.float32,
    beta2: np.float32,
    weight2: np.float32,
) -> None:
    for i in range(len(grad)):
        g = grad[i]
        mean_out[i] = mean[i] + weight1 * (g - mean[i])
        square_out[i] = beta2 * square[i] + weight2 * (g * g)


@compiled
def _adam_in_place(
    grad: Floats,
    mean: Floats,
    square: Floats,
    weight1: np.float32,
    beta2: np.float32,
    weight2: np.float32,
    square_factor: np.float32,
    mean_factor: np.float32,
    scaled_eps: np.float32,
    start: int,
    stop: int,
) -> None:
    # On its own, since arrays that do overlap are not processed as vectors.
    for first in range(start, stop, BLOCK):
        last = min(first + BLOCK, stop)
        g, m, v = grad[first:last], mean[first:last], square[first:last]
        for i in range(len(g)):
            m[i] += weight1 * (g[i] - m[i])
            v[i] = beta2 * v[i] + weight2 * (g[i] * g[i])
        _quotient(g, m, v, square_factor, mean_factor, scaled_eps)


@compiled
def _quotient(
    grad: Floats,
    mean: Floats,
    square: Floats,
    square_factor: np.float32,
    mean_factor: np.float32,
    scaled_eps: np.float32,
) -> None:
    for i in range(len(grad)):
        m, v = mean[i], square[i]
        divisor = np.sqrt(v * square_factor + m * m * mean_factor) + scaled_eps
        # Zero, or NaN where the square is not finite.
        grad[i] = m / divisor + (v - v)


@compiled
def _lion(
    grad: Floats,
    mean: Floats,
    mean_out: Floats,
    weight1: np.float32,
    weight2: np.float32,
    start: int,
    stop: int,
) -> None:
    own, before, after = grad[start:stop], mean[start:stop], mean_out[start:stop]
    for i in range(len(own)):
        g, m = own[i], before[i]
        mixed = m + weight1 * (g - m)
        after[i] = m + weight2 * (g - m)
        sign = np.float32(mixed > 0) - np.float32(mixed < 0)
        own[i] = sign + (mixed - mixed)


def adam_update(grad: Tensor, moments: Moments, spec: AdamSpec, step: Tensor) -> None:
    count, workers = float(step), spec.workers
    mean_correction, square_correction = 1 - spec.beta1**count, 1 - spec.beta2**count
    mean, square, mean_out, square_out = (x.numpy() for x in moments)
    # The correction of the mean is part of the divisor, so that there is one division.
    factors = (
        np.float32(1 - spec.beta1),
        np.float32(spec.beta2),
        np.float32(1 - spec.beta2),
        np.float32(mean_correction**2 / (square_correction * workers)),
        np.float32((workers - 1) / workers),
        np.float32(spec.eps * mean_correction),
    )
    if mean.ctypes.data == mean_out.ctypes.data:
        loop = partial(_adam_in_place, grad.numpy(), mean, square, *factors)
    else:
        loop = partial(_adam, grad.numpy(), mean, square, mean_out, square_out, *factors)
    in_slices(loop, grad.numel())


def lion_update(grad: Tensor, mean: Tensor, mean_out: Tensor, beta1: float, beta2: float) -> None:
    arrays = grad.numpy(), mean.numpy(), mean_out.numpy()
    loop = partial(_lion, *arrays, np.float32(1 - beta1), np.float32(1 - beta2))
    in_slices(loop, grad.numel())
