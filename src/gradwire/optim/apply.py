"""Applies mean updates to parameters: learning rate, decoupled weight decay, skipped steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def apply_updates(
    groups: Sequence[Mapping[str, Any]],
    *,
    check_finite: bool,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Subtracts `lr * (update + weight_decay * parameter)`, unless the step must be skipped.

    The update is the parameter's gradient, divided by `scale` if a GradScaler has not done so. With
    `check_finite` nothing changes if any update begins with NaN, as all do in a bucket that the
    non-finite guard has flagged; nor does it if a GradScaler has `found_inf`. The host does not
    wait for a GPU.
    """
    pairs = [_pairs(group) for group in groups]
    skip = _first_is_nonfinite(pairs) if check_finite else None
    if found_inf is not None:
        skip = found_inf if skip is None else torch.maximum(skip, found_inf.to(skip.device))
    for group, (parameters, updates) in zip(groups, pairs, strict=True):
        subtract(group, parameters, updates, scale, skip)


def subtract(
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    updates: Sequence[Tensor],
    scale: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Subtracts updates with the rate and the weight decay of a group, unless `skip` is 1."""
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        alike = [p for p in parameters if p.dtype == dtype]
        their = [_laid_out_as(p, u) for p, u in _of_dtype(parameters, updates, dtype)]
        # Plain SGD in one pass: here its weight decay is decoupled, as moments come before it.
        torch._fused_sgd_(
            alike,
            their,
            [],
            weight_decay=float(group["weight_decay"]),
            momentum=0.0,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=scale,
            found_inf=skip,
        )


def _of_dtype(
    parameters: Sequence[Tensor], updates: Sequence[Tensor], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    pairs = zip(parameters, updates, strict=True)
    return [(p, u) for p, u in pairs if p.dtype == dtype]


def _pairs(group: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the parameters of a group that have an update, and these."""
    parameters = [p for p in group["params"] if p.grad is not None]
    return parameters, [p.grad for p in parameters]


def _laid_out_as(parameter: Tensor, update: Tensor) -> Tensor:
    """Returns the update with the type and the strides of its parameter, for the fused kernel."""
    if update.stride() == parameter.stride() and update.dtype == parameter.dtype:
        return update
    return torch.empty_like(parameter).copy_(update)


def _first_is_nonfinite(pairs: Sequence[tuple[list[Tensor], list[Tensor]]]) -> Tensor | None:
    """Returns 1.0 if any update has a first entry that is not finite, else 0.0."""
    updates = [update for _, some in pairs for update in some if update.numel()]
    if not updates:
        return None
    firsts = torch.cat([update.as_strided((1,), (1,)).float() for update in updates])
    return (~firsts.isfinite()).any().to(torch.float32)
