"""Whose parameters are whose: gradients that went through two mounts would be averaged twice."""

from collections.abc import Iterable, Mapping
from weakref import ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from laconic.errors import ConfigError

# Neither the parameter nor its mount may live longer for standing here.
_owners = WeakIdKeyDictionary()


def check_free(parameters: Mapping[nn.Parameter, str], but: type | None) -> None:
    """Raises ConfigError if the gradients of any parameter go through a mount already.

    Mounts of type `but` do not count: their place can be taken only once.
    """
    for parameter, name in parameters.items():
        owner = _owner(parameter)
        if owner is not None and type(owner) is not but:
            raise ConfigError(
                f"{name}: its gradient goes through a {type(owner).__name__} already; detach that"
            )


def claim(parameters: Iterable[nn.Parameter], owner: object) -> None:
    for parameter in parameters:
        _owners[parameter] = ref(owner)


def release(parameters: Iterable[nn.Parameter], owner: object) -> None:
    for parameter in parameters:
        if _owner(parameter) is owner:
            del _owners[parameter]


def _owner(parameter: nn.Parameter) -> object | None:
    owner: object | None = _owners[parameter]() if parameter in _owners else None
    return owner
