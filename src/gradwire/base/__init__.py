"""Abstract base classes of the catalogue: compressors, memories, exchanges, update rules.

A method is a frozen dataclass (the algorithm *is* its parameters). It derives from `OneRound` if
one message per rank is enough, or from `MultiRound`. The families in `gradwire.compressors`
(`Cast`, `Sparsifier`, `Quantizer`) are ready-made kinds of `OneRound`.
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
    memoized,
)
from gradwire.base.exchange import Aggregator, Exchange, TwoLevelExchange, refuses_own_rounds
from gradwire.base.memory import Memory, weighted_sum
from gradwire.base.update_rule import UpdateRule

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
    "UpdateRule",
    "check_payload",
    "encode_with_feedback",
    "flat32",
    "memoized",
    "refuses_own_rounds",
    "weighted_sum",
]
