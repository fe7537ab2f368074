"""Threshold selection and sparse encoding, composed of the simpler kernels of a backend.

The reference and the CPU backend use these; the CUDA backend has fused kernels instead.
"""

from collections.abc import Callable, Sequence
from functools import partial
from sys import modules
from typing import cast

import torch
from torch import Tensor

from gradwire.kernels.protocol import Kernels
from gradwire.kernels.reference.packing import bitmap_bits, low_bits
from gradwire.kernels.reference.scatter import rounded
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EFInput


def compose(backend: str) -> dict[str, Callable[..., object]]:
    """Returns the kernels below, by name, for the backend in the module of this name.

    They look up the kernels that they call in that module at each call.
    """
    kernels = cast(Kernels, modules[backend])
    return {
        "select_by_threshold": partial(_select, kernels),
        "select_by_threshold_padded": partial(_select_padded, kernels),
        "encode_by_threshold": partial(_encode, kernels),
        "add_packed_ragged": partial(_add_ragged, kernels),
    }


def _select(kernels: Kernels, ef: EFInput, spec: ThresholdSpec) -> Tensor:
    """Returns the positions of all entries that reach the threshold: int64, ascending.

    Of more than `spec.max_count` entries, the largest are selected.
    """
    if spec.kind == "fixed":
        # Filled on the device: a copy from the host would synchronize.
        threshold = torch.full((1,), spec.threshold, device=ef.grad.device)
        return kernels.select_above(ef, threshold)
    threshold = _threshold(kernels, ef, spec)
    total = ef.grad if ef.residual_out is None else ef.residual_out
    index = kernels.select_above(EFInput(total), threshold)
    if spec.max_count and index.numel() > spec.max_count:
        index = index[kernels.select_largest(EFInput(total[index]), spec.max_count)]
    return index


def _select_padded(
    kernels: Kernels, ef: EFInput, spec: ThresholdSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the number of selected entries (int32), their positions and their values.

    Both have the length `max_selected`: positions are followed by anything, values by zeros.
    """
    index = _select(kernels, ef, spec)
    total = ef.grad if ef.residual_out is None else ef.residual_out
    count, length = index.numel(), max_selected(spec, total.numel())
    padded, values = index.new_zeros(length), total.new_zeros(length)
    padded[:count], values[:count] = index, total[index]
    return torch.full((1,), count, dtype=torch.int32, device=index.device), padded, values


def max_selected(spec: ThresholdSpec, numel: int) -> int:
    """Returns the largest number of entries that can be selected out of `numel`."""
    return min(spec.max_count or numel, numel)


def _threshold(kernels: Kernels, ef: EFInput, spec: ThresholdSpec) -> Tensor:
    if spec.kind == "sampled":
        return kernels.sampled_threshold(
            ef, spec.key, spec.sample_size, spec.sample_rank, spec.target_count
        )
    if spec.kind == "bisected":
        return kernels.bisected_threshold(ef, spec.target_count)
    if spec.kind == "normal":
        return kernels.normal_threshold(ef, spec.deviations, spec.target_count, spec.rounds)
    return kernels.excess_threshold(ef, spec.stage_ratios)


def _encode(
    kernels: Kernels, ef: EFInput, spec: ThresholdSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the number of selected entries (int32), their packed positions and their values.

    Both may be longer than needed, with the message at the beginning. `ef.residual_out` keeps what
    is not sent.
    """
    index = _select(kernels, ef, spec)
    if ef.residual_out is None:
        values = rounded(ef.grad[index], dtype)
    else:
        values = kernels.extract(ef.residual_out, index, dtype)
    numel, count = ef.grad.numel(), index.numel()
    packed = kernels.pack_index(index, low_bits(numel, count), bitmap_bits(numel, count))
    return torch.full((1,), count, dtype=torch.int32, device=index.device), packed, values


def _add_ragged(
    kernels: Kernels,
    out: Tensor,
    packed: Sequence[Tensor],
    values: Sequence[Tensor],
    weight: float,
) -> None:
    """Adds `weight` times the entries of each message, in order; messages may differ in length."""
    for index, row in zip(packed, values, strict=True):
        low, bits = low_bits(out.numel(), row.numel()), bitmap_bits(out.numel(), row.numel())
        kernels.add_packed(out, index.unsqueeze(0), low, bits, row.unsqueeze(0), weight)
