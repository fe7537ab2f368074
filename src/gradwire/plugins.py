"""The names that a method outside this package is made of: `register`, base classes, types, checks.

These names are stable; those of other modules may change. A method is registered by `register`, or
offered to every program by an entry point of its distribution (docs/how-to/plugins.md).
"""

from collections.abc import Callable
from typing import Any, TypeVar, overload

from gradwire import kernels
from gradwire.base import (
    Compressor,
    Exchange,
    FusedOneRound,
    Memory,
    MultiRound,
    OneRound,
    Traits,
    encode_with_feedback,
    memoized,
    refuses_own_rounds,
    weighted_sum,
)
from gradwire.checks import (
    check_flag,
    check_fraction_below_one,
    check_number,
    check_positive_fraction,
    check_whole,
)
from gradwire.compressors._cast import Cast
from gradwire.compressors._quantizer import Quantizer
from gradwire.compressors._sparsifier import (
    Sparsifier,
    ThresholdSparsifier,
    check_format,
    count_for_ratio,
)
from gradwire.control.base import (
    CONTROLLERS,
    Controller,
    ControllerState,
    DecisionLog,
    Setting,
    StepReport,
)
from gradwire.errors import ConfigError, WireError
from gradwire.identity import class_name
from gradwire.kernels.specs import RoundingSpec, ThresholdSpec
from gradwire.registry import COMPRESSORS, EXCHANGES, MEMORIES, Registry
from gradwire.types import (
    AllGather,
    AllToAll,
    Answer,
    Broadcast,
    EFInput,
    EncodeContext,
    Field,
    Layout,
    Mean,
    Parts,
    Payload,
    Request,
    Rounds,
    State,
)
from gradwire.wire.bits import pack_bits, packed_numel, unpack_bits

__all__ = [
    "AllGather",
    "AllToAll",
    "Answer",
    "Broadcast",
    "Cast",
    "Compressor",
    "ConfigError",
    "Controller",
    "ControllerState",
    "DecisionLog",
    "EFInput",
    "EncodeContext",
    "Exchange",
    "Field",
    "FusedOneRound",
    "Layout",
    "Mean",
    "Memory",
    "MultiRound",
    "OneRound",
    "Parts",
    "Payload",
    "Quantizer",
    "Request",
    "RoundingSpec",
    "Rounds",
    "Setting",
    "Sparsifier",
    "State",
    "StepReport",
    "ThresholdSparsifier",
    "ThresholdSpec",
    "Traits",
    "WireError",
    "check_flag",
    "check_format",
    "check_fraction_below_one",
    "check_number",
    "check_positive_fraction",
    "check_whole",
    "count_for_ratio",
    "encode_with_feedback",
    "kernels",
    "memoized",
    "pack_bits",
    "packed_numel",
    "refuses_own_rounds",
    "register",
    "unpack_bits",
    "weighted_sum",
]

C = TypeVar("C", bound=type)

_REGISTRIES: tuple[Registry[Any], ...] = (COMPRESSORS, MEMORIES, EXCHANGES, CONTROLLERS)


@overload
def register(cls: C, *, name: str | None = None) -> C: ...


@overload
def register(cls: None = None, *, name: str | None = None) -> Callable[[C], C]: ...


def register(cls: C | None = None, *, name: str | None = None) -> C | Callable[[C], C]:
    """Gives a compressor, memory, exchange or controller a name that specs can use.

    A function, `gradwire.register(MyTopK)`, or a decorator above that of the dataclass, with a name
    or without: `@gradwire.register(name="mine")`. The default is the name of the class in small
    letters: MyTopK is "mytopk". Called in every process that uses the name.
    """
    if cls is None:
        return lambda given: register(given, name=name)
    registry = _registry_of(cls)
    registry.add(cls, cls.__name__.lower().replace("_", "-") if name is None else name)
    return cls


def _registry_of(cls: object) -> Registry[Any]:
    """Returns the registry of a class's kind; raises ConfigError if it is of none or of several."""
    found = [r for r in _REGISTRIES if isinstance(cls, type) and issubclass(cls, r.kind)]
    if len(found) != 1:
        kinds = ", ".join(registry.kind.__name__ for registry in _REGISTRIES)
        given = class_name(cls) if isinstance(cls, type) else repr(cls)
        raise ConfigError(f"register: expected a subclass of one of {kinds}, got {given}")
    return found[0]
