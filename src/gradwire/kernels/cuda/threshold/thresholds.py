"""Thresholds for about k entries (definition: kernels/reference/thresholds.py).

The host only launches: the last program of each pass sets the parameters of the next one.
"""

import math
from collections.abc import Sequence
from struct import pack

import torch
from torch import Tensor

from gradwire.kernels.cuda.threshold.first_pass import Sifted, sift
from gradwire.kernels.cuda.threshold.histogram import BORDER
from gradwire.kernels.cuda.threshold.sampled_bounds import Search, begun
from gradwire.kernels.reference.thresholds import HALVINGS, LOWERINGS
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EFInput


def double(value: float) -> int:
    """The bits of a float64: as a number, Triton would round it to float32."""
    return int.from_bytes(pack("<d", value), "little", signed=True)


def search_of(aim: ThresholdSpec) -> Search:
    """The ranks that decide where the border of an aim is, and whether too many reach it."""
    few, many, most = aim.wanted, 0, aim.most + 1 if aim.most else 0
    if aim.kind == "sampled":
        search = Search(aim.kind, few, 0, most, rounds=LOWERINGS)
        return search._replace(key=aim.key, tried=aim.tried, top=aim.top)
    if aim.kind == "bisected":
        return Search(aim.kind, few, 2 * aim.wanted + 1, most, rounds=HALVINGS)
    if aim.kind == "normal":
        few, many = -(-2 * aim.wanted // 3), 4 * aim.wanted // 3 + 1
        return Search(aim.kind, few, many, most, double(aim.spread), aim.rounds)
    rise, *rises = (double(-math.log(share)) for share in aim.shares)
    return Search(aim.kind, most=most, factor=rise, rises=tuple(rises))


def found(given: EFInput, search: Search, packed: Tensor) -> Sifted:
    """What a search comes to, and marks on what may be chosen; `packed` is cleared."""
    return sift(given, search, begun(given, search), packed)


def _border(given: EFInput, aim: ThresholdSpec) -> Tensor:
    if not given.grad.numel():
        return given.grad.new_zeros(1)
    nothing = torch.empty(0, dtype=torch.int32, device=given.grad.device)
    state = found(given, search_of(aim), nothing).state
    return state[BORDER.value : BORDER.value + 1].to(torch.int32).view(torch.float32)


def sampled_border(given: EFInput, key: int, tried: int, top: int, enough: int) -> Tensor:
    return _border(given, ThresholdSpec("sampled", wanted=enough, key=key, tried=tried, top=top))


def bisected_border(given: EFInput, count: int) -> Tensor:
    return _border(given, ThresholdSpec("bisected", wanted=count))


def normal_border(given: EFInput, spread: float, count: int, rounds: int) -> Tensor:
    return _border(given, ThresholdSpec("normal", wanted=count, spread=spread, rounds=rounds))


def excess_border(given: EFInput, shares: Sequence[float]) -> Tensor:
    return _border(given, ThresholdSpec("excess", shares=tuple(shares)))
