"""What every kernel means, in plain torch: the yardstick of the others, on any device."""

from laconic.kernels.reference.bits import pack_bits, unpack_bits
from laconic.kernels.reference.index import index_fits, pack_index, unpack_index
from laconic.kernels.reference.lowrank import factor, factor_sum, lessen, orthonormal, outer
from laconic.kernels.reference.random import strata, uniform
from laconic.kernels.reference.rounding import round_add, round_pack, round_pack_sum
from laconic.kernels.reference.select import largest, largest_sum
from laconic.kernels.reference.sign import sign_add, sign_pack, sign_pack_sum

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
    "uniform",
    "unpack_bits",
    "unpack_index",
]
