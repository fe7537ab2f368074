"""Whose parameters are whose: gradients that went through two mounts would be averaged twice."""

from collections.abc import Iterable, Mapping
from weakref import ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from laconic.errors import ConfigError

# Neither the parameter nor its mount may live longer for standing here.
_owners = WeakIdKeyDictionary()


def check_free(parameters: Mapping[nn.Parameter, str]) -> None:
    """Raises ConfigError if the gradients of any parameter go through a mount already."""
    for parameter, name in parameters.items():
        owner = _owners[parameter]() if parameter in _owners else None
        if owner is not None:
            raise ConfigError(
                f"{name}: its gradient goes through a {type(owner).__name__} already; detach that"
            )


def claim(parameters: Iterable[nn.Parameter], owner: object) -> None:
    for parameter in parameters:
        _owners[parameter] = ref(owner)


def release(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        _owners.pop(parameter, None)
