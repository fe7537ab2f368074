"""Hidden matrices: the parameters of a model that optimisers such as Muon take."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import nn

from gradwire.errors import ConfigError

Predicate: TypeAlias = Callable[[str, nn.Parameter], bool]
"""Decides by name and parameter."""


def hidden_matrices(model: nn.Module) -> set[str]:
    """Returns the names of the weights that Muon takes by default.

    These are all parameters of two or more dimensions but those of embeddings (`nn.Embedding`,
    `nn.EmbeddingBag`), tied ones included, and of the output head, which is the last `nn.Linear`
    in the order of `model.modules()`.
    """
    modules = list(model.modules())
    embeddings = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    heads = [m for m in modules if isinstance(m, nn.Linear)][-1:]
    others = {p for module in (*embeddings, *heads) for p in module.parameters(recurse=False)}
    return {n for n, p in model.named_parameters() if p.dim() >= 2 and p not in others}


def chosen_matrices(
    method: str, named: Mapping[str, nn.Parameter], matrices: Predicate
) -> frozenset[str]:
    """Returns the names that a predicate chooses; raises ConfigError if one is no matrix."""
    chosen = [(name, p) for name, p in named.items() if matrices(name, p)]
    for name, parameter in chosen:
        if parameter.dim() < 2:
            raise ConfigError(
                f"{method}: matrices must choose parameters of two or more dimensions, got "
                f"{name!r} of shape {tuple(parameter.shape)}"
            )
    return frozenset(name for name, _ in chosen)
