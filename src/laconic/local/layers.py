"""The parameters of a model in parts: by number, or by the beginnings of their names."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import nn

from laconic.checks import check_whole
from laconic.errors import ConfigError

Division: TypeAlias = int | Sequence[Sequence[str]]
"""So many parts, dealt out layer by layer; or each part as beginnings of parameters' names."""

Named: TypeAlias = dict[str, nn.Parameter]


def divide(method: str, parameters: Mapping[str, nn.Parameter], how: Division) -> list[Named]:
    """The parts, each with its parameters in the model's order; every parameter is in one."""
    if isinstance(how, Sequence):
        return _by_names(method, parameters, how)
    check_whole(method, "fragments", how, 1)
    layers = list(dict.fromkeys(_layer(name) for name in parameters))
    if how > len(layers):
        raise ConfigError(f"{method}: {how} fragments of a model with {len(layers)} layers")
    # Neighbouring layers go into different parts, so that all parts are alike in depth.
    part_of = {layer: number % how for number, layer in enumerate(layers)}
    return [{n: p for n, p in parameters.items() if part_of[_layer(n)] == i} for i in range(how)]


def _by_names(
    method: str, parameters: Mapping[str, nn.Parameter], how: Sequence[Sequence[str]]
) -> list[Named]:
    parts = [
        {name: p for name, p in parameters.items() if name.startswith(tuple(starts))}
        for starts in how
    ]
    for name in parameters:
        count = sum(name in part for part in parts)
        if count != 1:
            raise ConfigError(f"{method}: parameter {name!r} is in {count} fragments, not in one")
    if not all(parts):
        raise ConfigError(f"{method}: a fragment without parameters in {list(how)}")
    return parts


def _layer(name: str) -> str:
    return name.rpartition(".")[0]
