"""The kernels for CUDA tensors: Triton where a loop over memory counts, torch for the rest.

Nothing here makes the host wait for the card.
"""

from laconic.kernels.cuda.gram import orthonormal
from laconic.kernels.cuda.lowrank import factor, factor_sum, lessen, outer
from laconic.kernels.cuda.rounding import round_add, round_pack, round_pack_sum
from laconic.kernels.cuda.sign import sign_add, sign_pack, sign_pack_sum
from laconic.kernels.reference import (
    index_fits,
    largest,
    largest_sum,
    pack_bits,
    pack_index,
    strata,
    unpack_bits,
    unpack_index,
)

__all__ = [
    "factor",
    "factor_sum",
    "index_fits",
    "largest",
    "largest_sum",
    "lessen",
    "orthonormal",
    "outer",
    "pack_bits",
    "pack_index",
    "round_add",
    "round_pack",
    "round_pack_sum",
    "sign_add",
    "sign_pack",
    "sign_pack_sum",
    "strata",
    "unpack_bits",
    "unpack_index",
]
