"""The kernels for CPU tensors, compiled by Numba: one pass over memory each, without the GIL.

Compiled code is cached on disk beside this package, so only a machine's first call waits.
"""

from laconic.kernels.cpu.bits import pack_bits, unpack_bits
from laconic.kernels.cpu.index import index_fits, pack_index, unpack_index
from laconic.kernels.cpu.lowrank import factor, factor_sum, lessen, orthonormal, outer
from laconic.kernels.cpu.random import strata
from laconic.kernels.cpu.rounding import round_add, round_pack, round_pack_sum
from laconic.kernels.cpu.select import largest, largest_sum
from laconic.kernels.cpu.sign import sign_add, sign_pack, sign_pack_sum

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
