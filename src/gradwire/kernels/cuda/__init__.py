"""CUDA backend, in Triton.

No kernel synchronizes the host with the device, except `reaching` and `passing`, which return
tensors of a data-dependent length; `tell` leaves the count on the device.
"""

from gradwire.kernels.cuda.cast import cast_add, cast_pack, cast_pack_sum
from gradwire.kernels.cuda.drift import arrive, depart, relay
from gradwire.kernels.cuda.low_rank import factor, factor_sum, lessen, outer
from gradwire.kernels.cuda.orthonormalize import orthonormal
from gradwire.kernels.cuda.packing import (
    index_fits,
    pack_bits,
    pack_index,
    unpack_bits,
    unpack_index,
)
from gradwire.kernels.cuda.random import random_blocks, strata
from gradwire.kernels.cuda.rounding import round_add, round_pack, round_pack_sum
from gradwire.kernels.cuda.scatter import add_at, add_packed, add_told, lift
from gradwire.kernels.cuda.sign import (
    sides_add,
    sides_pack,
    sides_pack_sum,
    sign_add,
    sign_pack,
    sign_pack_sum,
    votes_pack,
)
from gradwire.kernels.cuda.ternary import trits_add, trits_pack
from gradwire.kernels.cuda.threshold.emit import passing, passing_in_room, tell
from gradwire.kernels.cuda.threshold.select import largest, reaching
from gradwire.kernels.cuda.threshold.thresholds import (
    bisected_border,
    excess_border,
    normal_border,
    sampled_border,
)

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
