"""Mixing of a number of workers by a topology: checked weights, neighbors, and the spectral gap."""

from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import torch
from torch import Tensor

from gradwire.comm.base import Neighbors
from gradwire.decentralized.topology import Topology
from gradwire.errors import ConfigError
from gradwire.identity import identity_of

TOLERANCE = 1e-9
"""Largest difference from 1 of the sum of a row or column."""


@dataclass(frozen=True)
class Mixing:
    """The mixing matrices of a number of workers; step t uses number t modulo their count.

    All are doubly stochastic, which keeps the mean of all workers, and together they connect all
    workers.
    """

    topology: Topology
    workers: int

    def __post_init__(self) -> None:
        for matrix in self.matrices:
            _check_doubly_stochastic(matrix)
        _check_connected(torch.stack(self.matrices).sum(dim=0))
        if self.spectral_gap < TOLERANCE:
            raise ConfigError(
                "weights: the spectral gap is 0, so that workers would never agree; give every "
                "worker a weight of its own"
            )

    @cached_property
    def matrices(self) -> tuple[Tensor, ...]:
        return tuple(self.topology.matrices(self.workers))

    @property
    def period(self) -> int:
        """The number of steps after which the matrices repeat."""
        return len(self.matrices)

    @cached_property
    def spectral_gap(self) -> float:
        """1 - |W - J|, where W is the product of all matrices, J averages, and |.| is the 2-norm.

        A period of mixing shrinks the distance to the mean by at least the factor 1 - gap.
        """
        product = torch.eye(self.workers, dtype=torch.float64)
        for matrix in self.matrices:
            product = matrix @ product
        norm = torch.linalg.matrix_norm(product - 1 / self.workers, ord=2)
        return 1 - float(norm)

    def neighbors(self, rank: int, step: int) -> Neighbors:
        """Returns the ranks with which a worker exchanges messages in a step."""
        return self._peers[step % self.period][rank]

    def weights(self, rank: int, step: int) -> list[float]:
        """Returns the weights that a worker gives to all workers, itself included, in a step."""
        return self._rows[step % self.period][rank]

    def mean_degree(self, rank: int) -> float:
        """Returns the number of messages that a worker sends in a step, on average."""
        degrees = [len(self.neighbors(rank, step).targets) for step in range(self.period)]
        return sum(degrees) / self.period

    def identity(self) -> dict[str, object]:
        """Returns the topology and a checksum of its weights, which ranks and states compare."""
        numbers = torch.stack(self.matrices).numpy().tobytes()
        return {"topology": identity_of(self.topology), "weights": crc32(numbers)}

    def describe(self) -> str:
        per_period = f" in {self.period} steps" if self.period > 1 else ""
        return (
            f"{type(self.topology).__name__} of {self.workers} workers: spectral gap "
            f"{self.spectral_gap:.4g}{per_period}"
        )

    @cached_property
    def _peers(self) -> list[list[Neighbors]]:  # [period][rank]
        return [
            [Neighbors(_others(w[:, rank], rank), _others(w[rank], rank)) for rank in range(len(w))]
            for w in self.matrices
        ]

    @cached_property
    def _rows(self) -> list[list[list[float]]]:  # [period][rank][other]
        return [matrix.tolist() for matrix in self.matrices]


def _others(weights: Tensor, rank: int) -> tuple[int, ...]:
    return tuple(other for other in weights.nonzero().flatten().tolist() if other != rank)


def _check_doubly_stochastic(matrix: Tensor) -> None:
    """Raises ConfigError unless all weights are in [0, 1], and rows and columns sum to 1."""
    for name, rows in (("row", matrix), ("column", matrix.T)):
        for number, row in enumerate(rows):
            for other, weight in enumerate(row.tolist()):
                if not 0 <= weight <= 1:
                    raise ConfigError(
                        f"weights must be in [0, 1], got {weight:g} in {name} {number}, "
                        f"entry {other}"
                    )
            total = float(row.sum())
            if abs(total - 1) > TOLERANCE:
                raise ConfigError(
                    f"weights are not doubly stochastic: {name} {number} sums to {total:.12g}, "
                    "expected 1, or the mean of all workers would change"
                )


def _check_connected(weights: Tensor) -> None:
    """Raises ConfigError unless messages of worker 0 get to all others, step by step."""
    workers, reached, new = len(weights), {0}, [0]
    while new:
        sender = new.pop()
        for other in _others(weights[:, sender], sender):
            if other not in reached:
                reached.add(other)
                new.append(other)
    missing = sorted(set(range(workers)) - reached)
    if missing:
        raise ConfigError(
            f"the graph is not connected: no message of worker 0 gets to workers {missing}, which "
            "would train another model"
        )
