"""What a compressor, a memory and an exchange must be: the abstract classes of the catalogue.

A method is a frozen dataclass (the algorithm *is* its parameters) that derives from `OneRound` when
one message says it all (`cast.Cast` and `sparse.Sparsifier` are ready-made kinds of it), or from
`ManyRounds` when it needs a conversation.
"""

from gradwire.base.compressor import (
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
from gradwire.base.exchange import Exchange, Layered, Talker, carried_by
from gradwire.base.memory import Memory, weighted_sum

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
