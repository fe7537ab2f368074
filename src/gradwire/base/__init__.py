"""What a compressor, a memory and an exchange must be: the abstract classes of the catalogue.

A method is a frozen dataclass (the algorithm *is* its parameters) that derives from `OneRound` when
one message says it all (`cast.Cast` and `sparse.Sparsifier` are ready-made kinds of it), or from
`MultiRound` when it needs a conversation.
"""

from gradwire.base.compressor import (
    Compressor,
    Family,
    FusedOneRound,
    MultiRound,
    OneRound,
    Traits,
    check_payload,
    encode_with_feedback,
    flat32,
)
from gradwire.base.exchange import Aggregator, Exchange, TwoLevelExchange, carried_by
from gradwire.base.memory import Memory, weighted_sum

__all__ = [
    "Aggregator",
    "Compressor",
    "Exchange",
    "Family",
    "FusedOneRound",
    "Memory",
    "MultiRound",
    "OneRound",
    "Traits",
    "TwoLevelExchange",
    "carried_by",
    "check_payload",
    "encode_with_feedback",
    "flat32",
    "weighted_sum",
]
