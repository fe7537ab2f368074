"""Updates of optimisers in one pass over memory (definition: kernels/reference/updates.py)."""

from math import log2

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.specs import AdamSpec, Moments

BLOCK = 1024


@triton.jit
def _adam_kernel(
    grad_ptr, mean_ptr, square_ptr, mean_out_ptr, square_out_ptr, step_ptr, weight1, beta2, weight2,
    eps, log_beta1, log_beta2, share, numel, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    grad = tl.load(grad_ptr + index, mask=inside, other=0.0)
    mean = tl.load(mean_ptr + index, mask=inside, other=0.0)
    square = tl.load(square_ptr + index, mask=inside, other=0.0)
    # In float64, since a power close to 1 is subtracted from 1.
    step = tl.load(step_ptr).to(tl.float64)
    correction1 = (1 - tl.exp2(step * log_beta1)).to(tl.float32)
    correction2 = (1 - tl.exp2(step * log_beta2)).to(tl.float32)
    mean = mean + weight1 * (grad - mean)
    square = beta2 * square + weight2 * (grad * grad)
    # The square of a mean over n workers, of which each is the share 1 / n.
    corrected = mean / correction1
    whole = share * (square / correction2) + (1 - share) * (corrected * corrected)
    divisor = (tl.sqrt(whole) + eps) * correction1
    # Zero, or NaN where the square is not finite.
    update = mean / divisor + (square - square)
    tl.store(mean_out_ptr + index, mean, mask=inside)
    tl.store(square_out_ptr + index, square, mask=inside)
    tl.store(grad_ptr + index, update, mask=inside)


@triton.jit
def _lion_kernel(
    grad_ptr, mean_ptr, mean_out_ptr, weight1, weight2, numel, BLOCK: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    grad = tl.load(grad_ptr + index, mask=inside, other=0.0)
    mean = tl.load(mean_ptr + index, mask=inside, other=0.0)
    mixed = mean + weight1 * (grad - mean)
    sign = (mixed > 0).to(tl.float32) - (mixed < 0).to(tl.float32)
    tl.store(mean_out_ptr + index, mean + weight2 * (grad - mean), mask=inside)
    tl.store(grad_ptr + index, sign + (mixed - mixed), mask=inside)


def adam_update(grad: Tensor, moments: Moments, spec: AdamSpec, step: Tensor) -> None:
    numel = grad.numel()
    if numel:
        # A beta of zero: any power of it is zero, as is two to the power of -1000.
        logs = [log2(beta) if beta else -1000.0 for beta in (spec.beta1, spec.beta2)]
        _adam_kernel[(-(-numel // BLOCK),)](
            grad, *moments, step, 1 - spec.beta1, spec.beta2, 1 - spec.beta2, spec.eps, *logs,
            1 / spec.workers, numel, BLOCK=BLOCK,
        )  # fmt: skip


def lion_update(grad: Tensor, mean: Tensor, mean_out: Tensor, beta1: float, beta2: float) -> None:
    numel = grad.numel()
    if numel:
        _lion_kernel[(-(-numel // BLOCK),)](
            grad, mean, mean_out, 1 - beta1, 1 - beta2, numel, BLOCK=BLOCK
        )
