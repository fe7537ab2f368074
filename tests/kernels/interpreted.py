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
from quantiser_checks import (
    RULES,
    check_rounding,
    check_sides,
    check_signs,
    check_trits,
    check_votes,
    normal,
    odd_numbers,
)

# Fills what `torch.empty` gives with NaN or the largest integer, in this process for good.
torch.use_deterministic_algorithms(True)

# The interpreter rounds a fused multiply-add twice, which does not show if the product is exact.
DECAY = 1.0

SIZES = (1, 33, 2100)
FIRST = list({(rule.kind, rule.scale, rule.over): rule for rule in reversed(RULES)}.values())
"""One rule of each kind: what odd numbers become has nothing to do with widths and buckets."""


def compare() -> dict[str, int]:
    """How much of each was the same."""
    done: Counter[str] = Counter()
    inputs = {f"{size}": normal(size) for size in SIZES} | odd_numbers(1100)
    # Normal numbers are there in three sizes.
    del inputs["normal"]
    for name, x in inputs.items():
        rules = (*RULES, RoundingSpec("nearest", 30, 4)) if name.isdigit() else FIRST
        for rule in rules:
            check_rounding(cuda, x, rule, DECAY)
            done["roundings"] += 1
        for bucket in (300, 5000):
            check_sides(cuda, x, bucket, DECAY)
            done["sides"] += 1
        for clip in (0, 2.5):
            check_trits(cuda, x, clip)
            done["trits"] += 1
        if name != "huge":
            check_signs(cuda, x, DECAY)
            done["signs"] += 1
        check_votes(cuda, x)
        done["votes"] += 1
    with patch.object(drift, "LARGE", 1000):
        # Not bfloat16: the interpreter cuts its bits off where the card rounds them.
        for dtype in (torch.float32, torch.float16):
            for ahead in (1.0, 0.5):
                done["drifts"] += check_drift(cuda, 1.0, ahead, dtype)
    return dict(done)
