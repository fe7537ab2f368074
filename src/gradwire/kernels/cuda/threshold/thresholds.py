"""Thresholds for about k entries (definition: kernels/reference/thresholds.py).

The host only launches: the last program of each pass sets the parameters of the next one.
"""

import math
from collections.abc import Sequence
from struct import pack

import torch
from torch import Tensor

from gradwire.kernels.cuda.threshold.first_pass import FirstPassResult, first_pass
from gradwire.kernels.cuda.threshold.histogram import THRESHOLD
from gradwire.kernels.cuda.threshold.sampled_bounds import Search, initial_state
from gradwire.kernels.reference.thresholds import HALVINGS, LOWERINGS
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EFInput, Key


def float64_bits(value: float) -> int:
    """Returns the bits of a float64: as a number, Triton would round it to float32."""
    return int.from_bytes(pack("<d", value), "little", signed=True)


def search_of(spec: ThresholdSpec) -> Search:
    """Returns the ranks that decide the threshold of a spec, and whether too many reach it."""
    lower_rank, upper_rank, limit_rank = (
        spec.target_count,
        0,
        spec.max_count + 1 if spec.max_count else 0,
    )
    if spec.kind == "sampled":
        search = Search(spec.kind, lower_rank, 0, limit_rank, rounds=LOWERINGS)
        return search._replace(
            key=spec.key, sample_size=spec.sample_size, sample_rank=spec.sample_rank
        )
    if spec.kind == "bisected":
        return Search(spec.kind, lower_rank, 2 * spec.target_count + 1, limit_rank, rounds=HALVINGS)
    if spec.kind == "normal":
        lower_rank, upper_rank = -(-2 * spec.target_count // 3), 4 * spec.target_count // 3 + 1
        return Search(
            spec.kind,
            lower_rank,
            upper_rank,
            limit_rank,
            float64_bits(spec.deviations),
            spec.rounds,
        )
    factor, *stage_factors = (float64_bits(-math.log(ratio)) for ratio in spec.stage_ratios)
    return Search(
        spec.kind, limit_rank=limit_rank, factor=factor, stage_factors=tuple(stage_factors)
    )


def run_search(ef: EFInput, search: Search, packed: Tensor) -> FirstPassResult:
    """Searches the threshold and marks candidates; zeroes `packed`."""
    return first_pass(ef, search, initial_state(ef, search), packed)


def _threshold(ef: EFInput, spec: ThresholdSpec) -> Tensor:
    if not ef.grad.numel():
        return ef.grad.new_zeros(1)
    empty = torch.empty(0, dtype=torch.int32, device=ef.grad.device)
    state = run_search(ef, search_of(spec), empty).state
    return state[THRESHOLD.value : THRESHOLD.value + 1].to(torch.int32).view(torch.float32)


def sampled_threshold(
    ef: EFInput, key: Key, sample_size: int, sample_rank: int, min_count: int
) -> Tensor:
    return _threshold(
        ef,
        ThresholdSpec(
            "sampled",
            target_count=min_count,
            key=key,
            sample_size=sample_size,
            sample_rank=sample_rank,
        ),
    )


def bisected_threshold(ef: EFInput, count: int) -> Tensor:
    return _threshold(ef, ThresholdSpec("bisected", target_count=count))


def normal_threshold(ef: EFInput, deviations: float, count: int, rounds: int) -> Tensor:
    return _threshold(
        ef, ThresholdSpec("normal", target_count=count, deviations=deviations, rounds=rounds)
    )


def excess_threshold(ef: EFInput, stage_ratios: Sequence[float]) -> Tensor:
    return _threshold(ef, ThresholdSpec("excess", stage_ratios=tuple(stage_ratios)))
