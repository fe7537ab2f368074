"""The kernels for CPU tensors, compiled by Numba: one pass over memory each, without the GIL.

Large tensors are shared out among torch's threads (`threads.py`), with the same bits as in one.
Compiled code is cached on disk beside this package, so only a machine's first call waits.
"""

from laconic.kernels.cpu.bits import pack_bits, unpack_bits
from laconic.kernels.cpu.borders import (
    bisected_border,
    excess_border,
    normal_border,
    sampled_border,
)
from laconic.kernels.cpu.casts import cast_pack, cast_pack_sum
from laconic.kernels.cpu.drift import arrive, depart, relay
from laconic.kernels.cpu.entries import add_at, add_packed, lift
from laconic.kernels.cpu.index import index_fits, pack_index, unpack_index
from laconic.kernels.cpu.lowrank import factor, factor_sum, lessen, orthonormal, outer
from laconic.kernels.cpu.random import random_blocks, strata
from laconic.kernels.cpu.rounding import round_add, round_pack, round_pack_sum
from laconic.kernels.cpu.select import largest, reaching
from laconic.kernels.cpu.sides import sides_add, sides_pack, sides_pack_sum
from laconic.kernels.cpu.sign import sign_add, sign_pack, sign_pack_sum
from laconic.kernels.cpu.trits import trits_add, trits_pack
from laconic.kernels.cpu.votes import votes_pack
from laconic.kernels.reference.by_steps import composed
from laconic.kernels.reference.casts import cast_add

passing, passing_in_room, tell, add_told = composed(__name__)

__all__ = [
    "add_at",
    "add_packed",
    "add_told",
    "arrive",
    "bisected_border",
    "cast_add",
    "cast_pack",
    "cast_pack_sum",
    "depart",
    "excess_border",
    "factor",
    "factor_sum",
    "index_fits",
    "largest",
    "lessen",
    "lift",
    "normal_border",
    "orthonormal",
    "outer",
    "pack_bits",
    "pack_index",
    "passing",
    "passing_in_room",
    "random_blocks",
    "reaching",
    "relay",
    "round_add",
    "round_pack",
    "round_pack_sum",
    "sampled_border",
    "sides_add",
    "sides_pack",
    "sides_pack_sum",
    "sign_add",
    "sign_pack",
    "sign_pack_sum",
    "strata",
    "tell",
    "trits_add",
    "trits_pack",
    "unpack_bits",
    "unpack_index",
    "votes_pack",
]
