"""What every kernel means, in plain torch: the yardstick of the others, on any device."""

from laconic.kernels.reference.bits import pack_bits, unpack_bits
from laconic.kernels.reference.borders import (
    bisected_border,
    excess_border,
    normal_border,
    sampled_border,
)
from laconic.kernels.reference.by_steps import composed
from laconic.kernels.reference.casts import cast_add, cast_pack, cast_pack_sum
from laconic.kernels.reference.drift import arrive, depart, relay
from laconic.kernels.reference.entries import add_at, add_packed, lift
from laconic.kernels.reference.index import index_fits, pack_index, unpack_index
from laconic.kernels.reference.lowrank import factor, factor_sum, lessen, orthonormal, outer
from laconic.kernels.reference.random import random_blocks, strata, uniform
from laconic.kernels.reference.rounding import round_add, round_pack, round_pack_sum
from laconic.kernels.reference.select import largest, reaching
from laconic.kernels.reference.sides import sides_add, sides_pack, sides_pack_sum
from laconic.kernels.reference.sign import sign_add, sign_pack, sign_pack_sum
from laconic.kernels.reference.trits import trits_add, trits_pack
from laconic.kernels.reference.votes import votes_pack

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
    "uniform",
    "unpack_bits",
    "unpack_index",
    "votes_pack",
]
