"""Groups of parameters that may have methods of their own: embeddings, large matrices, the rest.

They are told apart by shape, since an engine knows no modules. Vectors belong to the last group,
and are sent dense by every method but the 16-bit ones.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor

EMBEDDING_ROWS = 6
"""A large matrix with at least so many rows for each column is like an embedding: one row for each
entry of a vocabulary. The matrices of a transformer's layers have at most four."""
LARGE_NUMEL = 1 << 16
"""Entries of a large matrix; encoding smaller ones costs more calls than bytes."""


class Group(NamedTuple):
    """Parameters of one kind."""

    label: str
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    patterns: tuple[str, ...]
    """Patterns of policies that match these names and no others."""

    def matches(self) -> list[tuple[str, tuple[str, ...]]]:
        """Returns the patterns in use, each with the names that it is the first to match."""
        first = {n: next(p for p in self.patterns if fnmatchcase(n, p)) for n in self.names}
        used = [p for p in self.patterns if p in first.values()]
        return [(p, tuple(n for n in self.names if first[n] == p)) for p in used]


def parameter_groups(tensors: Mapping[str, Tensor]) -> tuple[Group, ...]:
    """Returns the groups with at least one matrix, the last of which has the vectors as well."""
    found: dict[str, list[str]] = {"embeddings": [], "large matrices": [], "rest": []}
    vectors = [name for name, tensor in tensors.items() if tensor.dim() < 2]
    for name, tensor in tensors.items():
        if tensor.dim() >= 2:
            found[_label(tensor)].append(name)
    kinds = [(label, names) for label, names in found.items() if names] or [("rest", [])]
    kinds[-1][1].extend(vectors)
    every = [(label, name) for label, names in kinds for name in names]
    return tuple(
        Group(
            label,
            tuple(names),
            tuple(tensors[name] for name in names),
            _patterns(names, [n for kind, n in every if kind != label]),
        )
        for label, names in kinds
    )


def _label(tensor: Tensor) -> str:
    if tensor.numel() < LARGE_NUMEL:
        return "rest"
    columns = tensor.numel() // len(tensor)
    return "embeddings" if len(tensor) >= EMBEDDING_ROWS * columns else "large matrices"


def _patterns(names: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Returns patterns for names: with * for numbers, where that matches no other parameter."""
    found: dict[str, None] = {}
    for name in names:
        exact = re.sub(r"([\[*?])", r"[\1]", name)
        pattern = re.sub(r"\d+", "*", exact)
        matches_others = any(fnmatchcase(other, pattern) for other in others)
        found[exact if matches_others else pattern] = None
    return tuple(found)
