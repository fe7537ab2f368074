"""The dense optimiser: moments of the mean gradient, which DDP's own reducer has averaged.

For float32 parameters Adam and AdamW are torch's own fused kernel. Other update rules, and
parameters that the kernel does not take, go through the rule and one pass that subtracts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from gradwire.base import UpdateRule
from gradwire.optim.adam_update import AdamUpdate
from gradwire.optim.apply import subtract
from gradwire.types import State


class MeanGradient(NamedTuple):
    """A parameter with its mean gradient, its update rule and its moments."""

    parameter: Tensor
    grad: Tensor
    rule: UpdateRule
    state: State


Group = tuple[Mapping[str, Any], Sequence[MeanGradient]]
"""The options of a parameter group, and its parameters that have a gradient."""


def dense_step(
    groups: Sequence[Group],
    *,
    check_finite: bool,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor | None:
    """Takes a step with the mean gradients; returns 1.0 if it was skipped, None if not checked.

    Gradients are divided by `scale` if a GradScaler has not done so, and what it has `found_inf` is
    not checked again. The limits of norms are global: the norm of the gradients of all groups with
    one limit is bounded, as `clip_grad_norm_` does. The host does not wait for a GPU.
    """
    limits = {group["clip"] for group, some in groups if some}
    norms = {limit: _norm(groups, limit) for limit in limits if limit}
    skip = found_inf
    if check_finite and skip is None and limits:
        skip = _is_nonfinite([one.grad for group, some in groups for one in some])
    if skip is not None and not skip.is_cuda and float(skip):
        return skip
    for group, some in groups:
        divisor = _divisor(group["clip"], norms.get(group["clip"]), scale)
        is_fused = [_is_fused(one) for one in some]
        _fused(group, [x for x, fused in zip(some, is_fused, strict=True) if fused], divisor, skip)
        rest = [x for x, fused in zip(some, is_fused, strict=True) if not fused]
        updates = [_update(one, divisor, skip) for one in rest]
        subtract(group, [one.parameter for one in rest], updates, None, skip)
    return skip


def _is_nonfinite(grads: Sequence[Tensor]) -> Tensor:
    """Returns 1.0 if an entry of a gradient is infinite or NaN, or their sum overflows, else 0.0.

    A sum propagates both, in one pass. On a GPU a norm does so with one kernel for all gradients.
    """
    if grads[0].is_cuda:
        total = get_total_norm(grads)
    else:
        total = torch.stack([grad.sum() for grad in grads]).sum()
    return (~total.isfinite()).to(torch.float32)


def _norm(groups: Sequence[Group], limit: float) -> Tensor:
    """Returns the norm of the gradients of all groups with this limit, as they are."""
    return get_total_norm(
        [one.grad for group, some in groups if group["clip"] == limit for one in some]
    )


def _divisor(limit: float, norm: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """Returns what gradients are divided by: the loss scale, and more where the norm is large."""
    if not limit or norm is None:
        return scale
    norm = norm.float()
    if scale is None:
        return (norm / limit).clamp(min=1)
    return torch.maximum(norm / limit, scale.to(norm.device))


def _is_fused(one: MeanGradient) -> bool:
    """Returns whether torch's fused kernel can take a parameter, whose moments are contiguous."""
    alike = one.parameter.dtype == one.grad.dtype == torch.float32
    contiguous = one.parameter.is_contiguous() and one.grad.is_contiguous()
    return isinstance(one.rule, AdamUpdate) and alike and contiguous


def _fused(
    group: Mapping[str, Any],
    some: Sequence[MeanGradient],
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    if not some:
        return
    rule = some[0].rule
    assert isinstance(rule, AdamUpdate)
    adamw(
        [one.parameter for one in some],
        [one.grad for one in some],
        [one.state["exp_avg"].view(one.parameter.shape) for one in some],
        [one.state["exp_avg_sq"].view(one.parameter.shape) for one in some],
        [],
        [one.state["step"] for one in some],
        fused=True,
        grad_scale=divisor,
        found_inf=skip,
        amsgrad=False,
        beta1=rule.beta1,
        beta2=rule.beta2,
        lr=group["lr"],
        weight_decay=float(group["weight_decay"]),
        eps=rule.eps,
        maximize=False,
    )


def _update(one: MeanGradient, divisor: Tensor | None, skip: Tensor | None) -> Tensor:
    """Returns the update of one parameter, and changes its moments unless `skip` is 1."""
    grad = one.grad.to(torch.float32, memory_format=torch.contiguous_format)
    if divisor is not None:
        grad = grad / divisor
    if skip is None or not skip.is_cuda:
        return _applied(one, grad, one.state)
    pending = {key: torch.empty_like(moment) for key, moment in one.state.items()}
    update = _applied(one, grad, pending)
    for key, moment in one.state.items():
        torch.where(skip.bool(), moment, pending[key], out=moment)
    return update


def _applied(one: MeanGradient, grad: Tensor, pending: State) -> Tensor:
    """Returns the update of a parameter by its rule, which is the mean of one."""
    update = one.rule.update(grad, one.state, pending).view(one.parameter.shape)
    return one.rule.of_mean(update, one.state, pending)
