"""Ownership: records which handle exchanges a parameter's gradient; none may be averaged twice."""

from collections.abc import Iterable
from typing import NamedTuple
from weakref import ReferenceType, ref

from torch.utils.weak import WeakIdKeyDictionary

from gradwire.errors import ConfigError


class _Claim(NamedTuple):
    owner: ReferenceType[object]
    how_to_release: str


# Weak on both sides: an entry must not prolong the life of a parameter or its owner.
_claims = WeakIdKeyDictionary()


def check_free(parameters: Iterable[tuple[object, str]], but: type | None = None) -> None:
    """Raises ConfigError if a parameter already belongs to a handle or a local method.

    Parameters come with their names, and may be of any framework. Owners of type `but` do not
    count: their model has one hook slot, which shows a second owner by itself.
    """
    for parameter, name in parameters:
        owner = _owner(parameter)
        if owner is not None and type(owner) is not but:
            release = _claims[parameter].how_to_release
            raise ConfigError(
                f"{name}: its gradient goes through a {type(owner).__name__} already; {release}"
            )


def claim(parameters: Iterable[object], owner: object, how_to_release: str = "detach that") -> None:
    """Records the owner of parameters, and the advice for a second owner."""
    for parameter in parameters:
        _claims[parameter] = _Claim(ref(owner), how_to_release)


def release(parameters: Iterable[object], owner: object) -> None:
    for parameter in parameters:
        if _owner(parameter) is owner:
            del _claims[parameter]


def _owner(parameter: object) -> object | None:
    owner: object | None = _claims[parameter].owner() if parameter in _claims else None
    return owner
