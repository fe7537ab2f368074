"""Updates of optimisers in one pass over memory (definition: kernels/reference/updates.py)."""

from functools import partial
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.jit import compiled
from gradwire.kernels.cpu.threads import in_slices
from gradwire.kernels.specs import AdamSpec, Moments

Floats = NDArray[np.float32]


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
    root: np.float32,
    scaled_eps: np.float32,
    start: int,
    stop: int,
) -> None:
    for i in range(start, stop):
        g = grad[i]
        m = mean[i] + weight1 * (g - mean[i])
        v = beta2 * square[i] + weight2 * (g * g)
        mean_out[i] = m
        square_out[i] = v
        # Zero, or NaN where the square is not finite.
        grad[i] = m / (np.sqrt(v) * root + scaled_eps) + (v - v)


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
    for i in range(start, stop):
        g, m = grad[i], mean[i]
        mixed = m + weight1 * (g - m)
        mean_out[i] = m + weight2 * (g - m)
        sign = np.float32(mixed > 0) - np.float32(mixed < 0)
        grad[i] = sign + (mixed - mixed)


def adam_update(grad: Tensor, moments: Moments, spec: AdamSpec, step: Tensor) -> None:
    count = float(step)
    mean_correction, square_correction = 1 - spec.beta1**count, 1 - spec.beta2**count
    mean, square, mean_out, square_out = (x.numpy() for x in moments)
    # The correction of the mean is part of the divisor, so that there is one division.
    loop = partial(
        _adam,
        grad.numpy(),
        mean,
        square,
        mean_out,
        square_out,
        np.float32(1 - spec.beta1),
        np.float32(spec.beta2),
        np.float32(1 - spec.beta2),
        np.float32(mean_correction / sqrt(square_correction)),
        np.float32(spec.eps * mean_correction),
    )
    in_slices(loop, grad.numel())


def lion_update(grad: Tensor, mean: Tensor, mean_out: Tensor, beta1: float, beta2: float) -> None:
    arrays = grad.numpy(), mean.numpy(), mean_out.numpy()
    loop = partial(_lion, *arrays, np.float32(1 - beta1), np.float32(1 - beta2))
    in_slices(loop, grad.numel())
