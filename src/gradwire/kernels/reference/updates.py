"""Updates of optimisers: the moments of a gradient, and the update in the gradient's place.

An update is NaN wherever a moment is not finite, so that a step whose gradient overflows is
noticed: Adam's quotient of a finite mean and an infinite square would be zero, and so would be the
sign of NaN.
"""

import torch
from torch import Tensor

from gradwire.kernels.specs import AdamSpec, Moments


def adam_update(grad: Tensor, moments: Moments, spec: AdamSpec, step: Tensor) -> None:
    """Replaces the gradient by mean / (sqrt(square) + eps), both corrected for their start at zero.

    With several workers the square is that of a mean over them: (square + (n - 1) mean^2) / n.

    `step` is the number of this step, from 1 on, as a tensor of one entry.
    """
    mean, square, mean_out, square_out = moments
    torch.lerp(mean, grad, 1 - spec.beta1, out=mean_out)
    torch.mul(square, spec.beta2, out=square_out).addcmul_(grad, grad, value=1 - spec.beta2)
    # In float64, since a power close to 1 is subtracted from 1.
    count = step.double()
    mean_correction, square_correction = 1 - spec.beta1**count, 1 - spec.beta2**count
    scale = square_out / (square_correction * spec.workers)
    if spec.workers > 1:
        scale.add_((mean_out / mean_correction).square_(), alpha=1 - 1 / spec.workers)
    scale.sqrt_().add_(spec.eps).mul_(mean_correction)
    torch.div(mean_out, scale, out=grad)
    grad.masked_fill_(~square_out.isfinite(), torch.nan)


def lion_update(grad: Tensor, mean: Tensor, mean_out: Tensor, beta1: float, beta2: float) -> None:
    """Replaces the gradient by the sign of its mix with the running mean, which then follows it."""
    mixed = torch.lerp(mean, grad, 1 - beta1)
    torch.lerp(mean, grad, 1 - beta2, out=mean_out)
    torch.sign(mixed, out=grad)
    grad.masked_fill_(~mixed.isfinite(), torch.nan)
