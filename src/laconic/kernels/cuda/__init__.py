"""The kernels for CUDA tensors, in Triton.

Nothing here makes the host wait for the card, but `reaching` and `passing`, which must say how many
there are: `tell` leaves that on the card.
"""

from laconic.kernels.cuda.bits import pack_bits, unpack_bits
from laconic.kernels.cuda.borders import (
    bisected_border,
    excess_border,
    normal_border,
    sampled_border,
)
from laconic.kernels.cuda.casts import cast_add, cast_pack, cast_pack_sum
from laconic.kernels.cuda.drift import arrive, depart, relay
from laconic.kernels.cuda.entries import add_at, add_packed, lift
from laconic.kernels.cuda.gathered import add_told
from laconic.kernels.cuda.gram import orthonormal
from laconic.kernels.cuda.index import index_fits, pack_index, unpack_index
from laconic.kernels.cuda.lowrank import factor, factor_sum, lessen, outer
from laconic.kernels.cuda.random import random_blocks, strata
from laconic.kernels.cuda.rounding import round_add, round_pack, round_pack_sum
from laconic.kernels.cuda.select import largest, reaching
from laconic.kernels.cuda.sides import sides_add, sides_pack, sides_pack_sum
from laconic.kernels.cuda.sign import sign_add, sign_pack, sign_pack_sum
from laconic.kernels.cuda.tell import passing, passing_in_room, tell
from laconic.kernels.cuda.trits import trits_add, trits_pack
from laconic.kernels.cuda.votes import votes_pack

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
