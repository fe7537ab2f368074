"""What a compressor, a memory and an exchange must be: the abstract classes of the catalogue.

A method is a frozen dataclass (the algorithm *is* its parameters) that derives from `OneRound` when
one message says it all (`cast.Cast` and `sparse.Sparsifier` are ready-made kinds of it), or from
`ManyRounds` when it needs a conversation.
"""

from laconic.contract.compressor import (
    Compressor,
    Family,
    Fused,
    ManyRounds,
    OneRound,
    Traits,
    check_payload,
    flat32,
    take,
)
from laconic.contract.exchange import Exchange, Layered, carried_by
from laconic.contract.memory import Memory, weighted_sum
from laconic.contract.talker import Talker

__all__ = [
    "Compressor",
    "Exchange",
    "Family",
    "Fused",
    "Layered",
    "ManyRounds",
    "Memory",
    "OneRound",
    "Talker",
    "Traits",
    "carried_by",
    "check_payload",
    "flat32",
    "take",
    "weighted_sum",
]
