"""Compares the Triton kernels, interpreted on the CPU, with the reference."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections import Counter
from unittest.mock import patch

import torch

from drift_checks import check_drift
from gradwire.kernels import cuda
from gradwire.kernels.cuda import drift
from gradwire.kernels.specs import RoundingSpec
from quantizer_checks import (
    ROUNDINGS,
    check_rounding,
    check_signs,
    check_trits,
    check_two_means,
    check_uniform,
    check_votes,
    normal,
    odd_numbers,
)

# Makes `torch.empty` fill with NaN or the largest integer, for the whole process.
torch.use_deterministic_algorithms(True)

# The interpreter rounds a fused multiply-add twice, which has no effect if the product is exact.
DECAY = 1.0

SIZES = (1, 33, 2100)
ONE_PER_KIND = list(
    {(spec.kind, spec.scale, spec.scale_divisor): spec for spec in reversed(ROUNDINGS)}.values()
)
"""One spec of each kind: the handling of special numbers does not depend on widths and buckets."""


def compare() -> dict[str, int]:
    """Returns the number of comparisons of each kind."""
    compared: Counter[str] = Counter()
    inputs = {f"{size}": normal(size) for size in SIZES} | odd_numbers(1100)
    # Normal numbers are included in three sizes.
    del inputs["normal"]
    for name, x in inputs.items():
        rules = (*ROUNDINGS, RoundingSpec("nearest", 30, 4)) if name.isdigit() else ONE_PER_KIND
        for spec in rules:
            check_rounding(cuda, x, spec, DECAY)
            compared["roundings"] += 1
        for bucket in (300, 5000):
            check_two_means(cuda, x, bucket, DECAY)
            compared["sides"] += 1
        for clip in (0, 2.5):
            check_trits(cuda, x, clip)
            compared["trits"] += 1
        check_signs(cuda, x, DECAY)
        compared["signs"] += 1
        check_votes(cuda, x)
        compared["votes"] += 1
    for count in (0, *SIZES):
        for key in (7, (1 << 64) - 1):
            check_uniform(cuda, count, key)
            compared["uniforms"] += 1
    with patch.object(drift, "LARGE", 1000):
        # Not bfloat16: the interpreter truncates where the GPU rounds.
        for dtype in (torch.float32, torch.float16):
            for ahead in (1.0, 0.5):
                compared["drifts"] += check_drift(cuda, 1.0, ahead, dtype)
    return dict(compared)
