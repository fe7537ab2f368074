"""CPU backend, compiled by Numba: one pass over memory per kernel, without the GIL.

Large tensors are split among torch's threads (`threads.py`), with bitwise the same result as in one
thread. Compiled code is cached on disk beside this package, so only the first call on a machine
waits for the compiler.
"""

from gradwire.kernels.cpu.cast import cast_pack, cast_pack_sum
from gradwire.kernels.cpu.drift import arrive, depart, relay
from gradwire.kernels.cpu.low_rank import factor, factor_sum, lessen, orthonormal, outer
from gradwire.kernels.cpu.packing import (
    index_fits,
    pack_bits,
    pack_index,
    unpack_bits,
    unpack_index,
)
from gradwire.kernels.cpu.random import random_blocks, strata
from gradwire.kernels.cpu.rounding import round_add, round_pack, round_pack_sum
from gradwire.kernels.cpu.scatter import add_at, add_packed, lift
from gradwire.kernels.cpu.select import largest, reaching
from gradwire.kernels.cpu.sign import (
    sides_add,
    sides_pack,
    sides_pack_sum,
    sign_add,
    sign_pack,
    sign_pack_sum,
    votes_pack,
)
from gradwire.kernels.cpu.ternary import trits_add, trits_pack
from gradwire.kernels.cpu.thresholds import (
    bisected_border,
    excess_border,
    normal_border,
    sampled_border,
)
from gradwire.kernels.reference.cast import cast_add
from gradwire.kernels.reference.composed import composed

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
