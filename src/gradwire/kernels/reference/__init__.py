"""Reference backend: every kernel in plain torch, on any device. It defines the other backends."""

from gradwire.kernels.reference.cast import cast_add, cast_pack, cast_pack_sum
from gradwire.kernels.reference.composed import composed
from gradwire.kernels.reference.drift import arrive, depart, relay
from gradwire.kernels.reference.low_rank import factor, factor_sum, lessen, orthonormal, outer
from gradwire.kernels.reference.packing import (
    index_fits,
    pack_bits,
    pack_index,
    unpack_bits,
    unpack_index,
)
from gradwire.kernels.reference.random import random_blocks, strata, uniform
from gradwire.kernels.reference.rounding import round_add, round_pack, round_pack_sum
from gradwire.kernels.reference.scatter import add_at, add_packed, lift
from gradwire.kernels.reference.select import largest, reaching
from gradwire.kernels.reference.sign import (
    sides_add,
    sides_pack,
    sides_pack_sum,
    sign_add,
    sign_pack,
    sign_pack_sum,
    votes_pack,
)
from gradwire.kernels.reference.ternary import trits_add, trits_pack
from gradwire.kernels.reference.thresholds import (
    bisected_border,
    excess_border,
    normal_border,
    sampled_border,
)

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
