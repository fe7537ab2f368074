"""Whose parameters are whose: gradients that went through two mounts would be averaged twice."""

from collections.abc import Iterable
from weakref import ref

from torch.utils.weak import WeakIdKeyDictionary

from laconic.errors import ConfigError

# Neither the parameter nor its mount may live longer for standing here.
_owners = WeakIdKeyDictionary()


def check_free(parameters: Iterable[tuple[object, str]], but: type | None) -> None:
    """Raises ConfigError if the gradients of any parameter go through a mount already.

    Parameters come with their names, and are whatever a framework has. Mounts of type `but` do not
    count: their place can be taken only once.
    """
    for parameter, name in parameters:
        owner = _owner(parameter)
        if owner is not None and type(owner) is not but:
            raise ConfigError(
                f"{name}: its gradient goes through a {type(owner).__name__} already; detach that"
            )


def claim(parameters: Iterable[object], owner: object) -> None:
    for parameter in parameters:
        _owners[parameter] = ref(owner)


def release(parameters: Iterable[object], owner: object) -> None:
    for parameter in parameters:
        if _owner(parameter) is owner:
            del _owners[parameter]


def _owner(parameter: object) -> object | None:
    owner: object | None = _owners[parameter]() if parameter in _owners else None
    return owner
