"""Topologies: which workers exchange messages, and with which weights they average.

A topology gives the edges of any number of workers; an edge (i, j) carries messages from i to j.
Boyd, Diaconis & Xiao 2004 (Metropolis weights); Ying et al. 2021, arXiv:2110.13363 (exponential
graphs).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import isqrt
from typing import TypeAlias

import torch
from torch import Tensor

from gradwire.checks import check_whole
from gradwire.errors import ConfigError
from gradwire.spec import from_settings, read_settings

Edge: TypeAlias = tuple[int, int]


class Topology(ABC):
    """Edges and weights of a number of workers, which may alternate between steps."""

    @abstractmethod
    def matrices(self, workers: int) -> list[Tensor]:
        """Returns the mixing matrices of successive steps, which repeat, in float64.

        Entry (i, j) is the weight that worker i gives to what worker j sent.
        """


@dataclass(frozen=True)
class Ring(Topology):
    """Every worker exchanges messages with the one before it and the one after it."""

    def matrices(self, workers: int) -> list[Tensor]:
        return [metropolis(workers, [(i, (i + 1) % workers) for i in range(workers)])]


@dataclass(frozen=True)
class Torus(Topology):
    """A grid of workers whose rows and columns are rings.

    With `rows` 0 it is as square as the number of workers allows; a prime number makes it a ring.
    """

    rows: int = 0

    def __post_init__(self) -> None:
        check_whole("torus", "rows", self.rows, 0)

    def matrices(self, workers: int) -> list[Tensor]:
        rows = self.rows or _most_square(workers)
        if workers % rows:
            raise ConfigError(
                f"torus: rows must divide the number of workers, {workers}, got {rows}"
            )
        columns = workers // rows
        right = [(i, i // columns * columns + (i + 1) % columns) for i in range(workers)]
        down = [(i, (i + columns) % workers) for i in range(workers)]
        return [metropolis(workers, [*right, *down])]


@dataclass(frozen=True)
class Exponential(Topology):
    """Worker i sends to the workers i + 1, i + 2, i + 4, and so on; all weights are equal."""

    def matrices(self, workers: int) -> list[Tensor]:
        offsets = _powers_of_two(workers)
        return [circulant(workers, [0, *offsets], 1 / (len(offsets) + 1))]


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """Worker i sends to i + 1 in one step, to i + 2 in the next, then to i + 4, and so on.

    One message a step: both weights are 1/2. Of 2^k workers, k steps compute the exact mean.
    """

    def matrices(self, workers: int) -> list[Tensor]:
        found = [circulant(workers, [0, offset], 1 / 2) for offset in _powers_of_two(workers)]
        return found or [torch.eye(1, dtype=torch.float64)]


@dataclass(frozen=True)
class Complete(Topology):
    """Every worker exchanges messages with every other."""

    def matrices(self, workers: int) -> list[Tensor]:
        pairs = [(i, j) for i in range(workers) for j in range(i)]
        return [metropolis(workers, pairs)]


@dataclass(frozen=True)
class Star(Topology):
    """Every worker exchanges messages with `center` alone."""

    center: int = 0

    def __post_init__(self) -> None:
        check_whole("star", "center", self.center, 0)

    def matrices(self, workers: int) -> list[Tensor]:
        check_whole("star", "center", self.center, 0, workers - 1)
        pairs = [(self.center, i) for i in range(workers) if i != self.center]
        return [metropolis(workers, pairs)]


@dataclass(frozen=True)
class Graph(Topology):
    """The workers of each pair exchange messages; weights are those of Metropolis."""

    edges: tuple[Edge, ...]

    def __init__(self, edges: Iterable[Edge]) -> None:
        # A list, or a generator, is as good as a tuple.
        object.__setattr__(self, "edges", tuple(_edge(pair) for pair in edges))

    def matrices(self, workers: int) -> list[Tensor]:
        for pair in self.edges:
            if max(pair) >= workers:
                raise ConfigError(
                    f"graph: workers must be 0 to {workers - 1}, got the edge {list(pair)}"
                )
        return [metropolis(workers, self.edges)]


@dataclass(frozen=True)
class Weights(Topology):
    """A mixing matrix of one's own: row i has the weights that worker i gives to each worker.

    Worker i receives from j where the weight is not zero. All rows and columns must sum to 1.
    """

    rows: tuple[tuple[float, ...], ...]

    def __init__(self, rows: Tensor | Sequence[Sequence[float]]) -> None:
        own = rows.tolist() if isinstance(rows, Tensor) else rows
        try:
            numbers = tuple(tuple(float(weight) for weight in row) for row in own)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"weights: expected rows of numbers, got {rows!r:.80}") from error
        object.__setattr__(self, "rows", numbers)

    def matrices(self, workers: int) -> list[Tensor]:
        lengths = {len(row) for row in self.rows}
        if len(self.rows) != workers or lengths != {workers}:
            shape = f"{len(self.rows)} rows of {' or '.join(map(str, sorted(lengths)))}"
            raise ConfigError(
                f"weights: {workers} workers need {workers} rows of {workers}, got {shape}"
            )
        return [torch.tensor(self.rows, dtype=torch.float64)]


TOPOLOGIES: dict[str, type[Topology]] = {
    "complete": Complete,
    "exponential": Exponential,
    "one_peer": OnePeerExponential,
    "ring": Ring,
    "star": Star,
    "torus": Torus,
}
"""Topologies that a text can name; a graph and weights are given as objects."""


def topology_of(topology: Topology | str) -> Topology:
    """Returns a topology, which may be given as text such as "ring" or "torus:rows=2"."""
    if isinstance(topology, Topology):
        return topology
    if not isinstance(topology, str):
        raise ConfigError(f"topology: expected a Topology or its name, got {topology!r:.80}")
    name, settings = read_settings(topology)
    key = name.replace("-", "_")
    if key not in TOPOLOGIES:
        close = get_close_matches(key, TOPOLOGIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(TOPOLOGIES)}"
        raise ConfigError(f"no topology named {name!r}; {hint}")
    return from_settings(key, TOPOLOGIES[key], settings)


def metropolis(workers: int, pairs: Iterable[Edge]) -> Tensor:
    """Returns the weights 1 / (1 + the larger degree of both ends); the rest is a worker's own.

    Rows and columns sum to 1 for any undirected graph. A pair that occurs twice is one edge.
    """
    joined = torch.zeros(workers, workers, dtype=torch.float64)
    for i, j in pairs:
        if i != j:
            joined[i, j] = joined[j, i] = 1.0
    degrees = joined.sum(dim=1)
    weights = joined / (1 + torch.maximum(degrees[:, None], degrees[None, :]))
    return weights + torch.diag(1 - weights.sum(dim=1))


def circulant(workers: int, offsets: Iterable[int], weight: float) -> Tensor:
    """Returns the matrix in which every worker gets `weight` from those that far before it."""
    matrix = torch.zeros(workers, workers, dtype=torch.float64)
    for offset in offsets:
        for i in range(workers):
            matrix[(i + offset) % workers, i] += weight
    return matrix


def _powers_of_two(workers: int) -> list[int]:
    return [1 << t for t in range((workers - 1).bit_length())]


def _most_square(workers: int) -> int:
    """Returns the largest divisor that is at most the square root."""
    return max(rows for rows in range(1, isqrt(workers) + 1) if workers % rows == 0)


def _edge(pair: object) -> Edge:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise ConfigError(f"graph: an edge must be a pair of workers, got {pair!r:.40}")
    for end in pair:
        check_whole("graph", "worker", end, 0)
    i, j = pair
    if i == j:
        raise ConfigError(f"graph: an edge must join two workers, got {[i, j]}")
    return i, j
