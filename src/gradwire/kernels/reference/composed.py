"""Threshold selection and sparse encoding, composed of the simpler kernels of a backend.

The reference and the CPU backend use these; the CUDA backend has fused kernels instead.
"""

from collections.abc import Callable, Sequence
from functools import partial
from sys import modules
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor

from gradwire.kernels.reference.packing import bitmap_bits, low_bits
from gradwire.kernels.reference.scatter import rounded
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EFInput

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


ThresholdSparsifier: TypeAlias = Callable[[EFInput, ThresholdSpec], Tensor]
InRoom: TypeAlias = Callable[[EFInput, ThresholdSpec], tuple[Tensor, Tensor, Tensor]]
Tell: TypeAlias = Callable[[EFInput, ThresholdSpec, torch.dtype], tuple[Tensor, Tensor, Tensor]]
AddTold: TypeAlias = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], float], None]


def composed(backend: str) -> tuple[ThresholdSparsifier, InRoom, Tell, AddTold]:
    """What a backend has no loops for, made of those that it has, by its module's name."""
    here = cast("Kernels", modules[backend])
    told = partial(tell_by_steps, here), partial(add_one_by_one, here)
    return partial(passing_by_steps, here), partial(padded_by_steps, here), *told


def passing_by_steps(kernels: "Kernels", given: EFInput, aim: ThresholdSpec) -> Tensor:
    """The positions of all that reach the border of an aim; of more than its most, the largest."""
    if aim.kind == "fixed":
        # Filled where it is: a copy from the host would wait.
        border = torch.full((1,), aim.border, device=given.grad.device)
        return kernels.reaching(given, border)
    border = _border(kernels, given, aim)
    total = given.grad if given.residual_out is None else given.residual_out
    index = kernels.reaching(EFInput(total), border)
    if aim.most and index.numel() > aim.most:
        index = index[kernels.largest(EFInput(total[index]), aim.most)]
    return index


def padded_by_steps(
    kernels: "Kernels", given: EFInput, aim: ThresholdSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """How many there are, the same in room for as many as there can be, and their values."""
    index = passing_by_steps(kernels, given, aim)
    total = given.grad if given.residual_out is None else given.residual_out
    count, most = index.numel(), most_of(aim, total.numel())
    padded, values = index.new_zeros(most), total.new_zeros(most)
    padded[:count], values[:count] = index, total[index]
    return torch.full((1,), count, dtype=torch.int32, device=index.device), padded, values


def most_of(aim: ThresholdSpec, numel: int) -> int:
    """How many of `numel` entries can be chosen."""
    return min(aim.most or numel, numel)


def _border(kernels: "Kernels", given: EFInput, aim: ThresholdSpec) -> Tensor:
    if aim.kind == "sampled":
        return kernels.sampled_border(given, aim.key, aim.tried, aim.top, aim.wanted)
    if aim.kind == "bisected":
        return kernels.bisected_border(given, aim.wanted)
    if aim.kind == "normal":
        return kernels.normal_border(given, aim.spread, aim.wanted, aim.rounds)
    return kernels.excess_border(given, aim.shares)


def tell_by_steps(
    kernels: "Kernels", given: EFInput, aim: ThresholdSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """How many pass, their positions as bytes, and their values; what is left stays in `residual_out`."""
    index = passing_by_steps(kernels, given, aim)
    if given.residual_out is None:
        values = rounded(given.grad[index], dtype)
    else:
        values = kernels.lift(given.residual_out, index, dtype)
    numel, count = given.grad.numel(), index.numel()
    packed = kernels.pack_index(index, low_bits(numel, count), bitmap_bits(numel, count))
    return torch.full((1,), count, dtype=torch.int32, device=index.device), packed, values


def add_one_by_one(
    kernels: "Kernels",
    out: Tensor,
    packed: Sequence[Tensor],
    values: Sequence[Tensor],
    weight: float,
) -> None:
    """Adds `weight` times what each message says, in order, each of its own length."""
    for places, said in zip(packed, values, strict=True):
        low, bits = low_bits(out.numel(), said.numel()), bitmap_bits(out.numel(), said.numel())
        kernels.add_packed(out, places.unsqueeze(0), low, bits, said.unsqueeze(0), weight)
