"""Whose parameters are whose: what went through two of us would be said, and averaged, twice."""

from collections.abc import Iterable
from typing import NamedTuple
from weakref import ReferenceType, ref

from torch.utils.weak import WeakIdKeyDictionary

from gradwire.errors import ConfigError


class _Claim(NamedTuple):
    owner: ReferenceType[object]
    way_out: str


# Neither the parameter nor its owner may live longer for standing here.
_claims = WeakIdKeyDictionary()


def check_free(parameters: Iterable[tuple[object, str]], but: type | None = None) -> None:
    """Raises ConfigError if any parameter goes through a mount or a local method already.

    Parameters come with their names, and are whatever a framework has. Mounts of type `but` do not
    count: their place can be taken only once.
    """
    for parameter, name in parameters:
        owner = _owner(parameter)
        if owner is not None and type(owner) is not but:
            way_out = _claims[parameter].way_out
            raise ConfigError(
                f"{name}: its gradient goes through a {type(owner).__name__} already; {way_out}"
            )


def claim(parameters: Iterable[object], owner: object, way_out: str = "detach that") -> None:
    """Notes whose they are, and how they get free: what a second owner is told to do."""
    for parameter in parameters:
        _claims[parameter] = _Claim(ref(owner), way_out)


def release(parameters: Iterable[object], owner: object) -> None:
    for parameter in parameters:
        if _owner(parameter) is owner:
            del _claims[parameter]


def _owner(parameter: object) -> object | None:
    owner: object | None = _claims[parameter].owner() if parameter in _claims else None
    return owner
