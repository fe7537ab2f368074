"""Compares the Triton kernels, interpreted on the CPU, with the reference."""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from collections import Counter

from laconic.kernels import cuda
from laconic.kernels.rule import Rule
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

# The interpreter rounds a fused multiply-add twice, which does not show if the product is exact.
DECAY = 1.0


def main() -> None:
    done: Counter[str] = Counter()
    inputs = {size: normal(size) for size in (1, 33, 2100)} | odd_numbers(1100)
    for name, x in inputs.items():
        for rule in (*RULES, Rule("nearest", 30, 4)):
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
    print(json.dumps(done))


if __name__ == "__main__":
    main()
