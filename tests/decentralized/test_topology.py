"""Topologies: doubly stochastic weights, spectral gaps, and graphs that are refused."""

import pytest
import torch

from gradwire.comm.base import Neighbors
from gradwire.decentralized import (
    Complete,
    Exponential,
    Graph,
    Mixing,
    OnePeerExponential,
    Ring,
    Star,
    Topology,
    Torus,
    Weights,
)
from gradwire.decentralized.topology import TOPOLOGIES, topology_of
from gradwire.errors import ConfigError

PATH = Graph([(0, 1), (1, 2)])
ALL = [Ring(), Torus(), Exponential(), OnePeerExponential(), Complete(), Star(), Star(center=1)]


@pytest.mark.parametrize("topology", ALL, ids=str)
@pytest.mark.parametrize("workers", [2, 3, 4, 6, 7, 8, 16])
def test_weights_are_doubly_stochastic_and_on_edges_alone(topology: Topology, workers: int) -> None:
    mixing = Mixing(topology, workers)
    assert 0 < mixing.spectral_gap <= 1 + 1e-12
    for step, matrix in enumerate(mixing.matrices):
        ones = torch.ones(workers, dtype=torch.float64)
        torch.testing.assert_close(matrix.sum(0), ones)
        torch.testing.assert_close(matrix.sum(1), ones)
        if not isinstance(topology, Exponential | OnePeerExponential):
            assert torch.equal(matrix, matrix.T)
        for rank in range(workers):
            peers, weights = mixing.neighbors(rank, step), mixing.weights(rank, step)
            assert {r for r, w in enumerate(weights) if w} <= {rank, *peers.sources}
            assert rank not in {*peers.targets, *peers.sources}
            # Every message has two ends.
            assert all(rank in mixing.neighbors(to, step).sources for to in peers.targets)


def test_a_single_worker_has_no_neighbors() -> None:
    for topology in ALL[:-1]:
        mixing = Mixing(topology, 1)
        assert mixing.neighbors(0, 0) == Neighbors((), ())
        assert mixing.weights(0, 0) == [1.0]


@pytest.mark.parametrize(
    ("topology", "workers", "gap"),
    [
        (Ring(), 4, 0.667),
        (Ring(), 8, 0.195),
        (Ring(), 16, 0.051),
        (Ring(), 64, 0.0032),
        (Torus(), 16, 0.400),
        (Torus(), 64, 0.117),
        (Exponential(), 4, 0.667),
        (Exponential(), 8, 0.500),
        (Exponential(), 16, 0.400),
        (Exponential(), 64, 0.286),
        (Complete(), 8, 1.0),
        # A center that waits for all takes 1/8 of a leaf's distance away.
        (Star(), 8, 0.125),
    ],
    ids=str,
)
def test_spectral_gaps(topology: Topology, workers: int, gap: float) -> None:
    assert Mixing(topology, workers).spectral_gap == pytest.approx(gap, abs=6e-4)


@pytest.mark.parametrize("workers", [2, 4, 8, 16, 64])
def test_one_peer_steps_compute_the_exact_mean_of_a_power_of_two(workers: int) -> None:
    mixing = Mixing(OnePeerExponential(), workers)
    product = torch.eye(workers, dtype=torch.float64)
    for matrix in mixing.matrices:
        product = matrix @ product
    assert torch.equal(product, torch.full_like(product, 1 / workers))
    assert mixing.period == workers.bit_length() - 1
    assert mixing.mean_degree(0) == 1


def test_metropolis_by_hand() -> None:
    # Degrees 1, 2, 1, so that both edges have the weight 1/3.
    [matrix] = PATH.matrices(3)
    expected = torch.tensor([[2, 1, 0], [1, 1, 1], [0, 1, 2]], dtype=torch.float64) / 3
    torch.testing.assert_close(matrix, expected)
    assert Graph([(1, 0), (0, 1), (1, 2)]).matrices(3)[0].equal(matrix)
    assert Mixing(PATH, 3).neighbors(1, 5) == Neighbors((0, 2), (0, 2))


def test_directed_edges_point_from_sender_to_receiver() -> None:
    mixing = Mixing(Exponential(), 8)
    assert mixing.neighbors(0, 0) == Neighbors((1, 2, 4), (4, 6, 7))
    one_peer = Mixing(OnePeerExponential(), 8)
    assert [one_peer.neighbors(0, t).targets for t in range(4)] == [(1,), (2,), (4,), (1,)]


def test_own_weights() -> None:
    mixing = Mixing(Weights([[0.5, 0.5, 0], [0.25, 0.25, 0.5], [0.25, 0.25, 0.5]]), 3)
    assert mixing.neighbors(0, 0) == Neighbors((1, 2), (1,))
    assert mixing.weights(1, 0) == [0.25, 0.25, 0.5]
    tensor = torch.full((4, 4), 0.25)
    assert Mixing(Weights(tensor), 4).spectral_gap == pytest.approx(1)


def test_names() -> None:
    assert topology_of("torus:rows=2") == Torus(rows=2)
    assert topology_of("one-peer") == OnePeerExponential()
    assert {type(topology_of(name)) for name in TOPOLOGIES} == {type(t) for t in ALL}
    with pytest.raises(ConfigError, match="no topology named 'rings'; did you mean 'ring'"):
        topology_of("rings")
    with pytest.raises(ConfigError, match="torus: unknown parameter"):
        topology_of("torus:row=2")
    with pytest.raises(ConfigError, match="expected a Topology or its name, got 3"):
        topology_of(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("topology", "workers", "text"),
    [
        (Graph([(0, 1), (2, 3)]), 4, r"not connected: no message .* gets to workers \[2, 3\]"),
        (PATH, 4, r"not connected.*\[3\]"),
        (Graph([]), 2, "not connected"),
        (Graph([(0, 5)]), 4, r"graph: workers must be 0 to 3, got the edge \[0, 5\]"),
        (Torus(rows=3), 8, "torus: rows must divide the number of workers, 8, got 3"),
        (Star(center=4), 4, "star: center must be 0 to 3, got 4"),
        (Weights([[1, 0], [0, 1]]), 2, "not connected"),
        (Weights([[0.5, 0.5], [0.4, 0.5]]), 2, "not doubly stochastic: row 1 sums to 0.9"),
        (Weights([[0.2, 0.8], [0.2, 0.8]]), 2, "not doubly stochastic: column 0 sums to 0.4"),
        (Weights([[1.5, -0.5], [-0.5, 1.5]]), 2, r"weights must be in \[0, 1\], got 1.5"),
        (Weights([[float("nan")] * 2] * 2), 2, r"weights must be in \[0, 1\], got nan"),
        (Weights([[0, 1], [1, 0]]), 2, "the spectral gap is 0"),
        (Weights([[0.5, 0.5]]), 2, "2 workers need 2 rows of 2, got 1 rows of 2"),
    ],
    ids=str,
)
def test_refusals(topology: Topology, workers: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Mixing(topology, workers)


@pytest.mark.parametrize("edge", [(0, 0), (0, -1), (0, 1.5), (0,), 3])
def test_edges_that_join_no_two_workers(edge: object) -> None:
    with pytest.raises(ConfigError, match="graph: "):
        Graph([edge])  # type: ignore[list-item]


def test_weights_that_are_no_matrix() -> None:
    with pytest.raises(ConfigError, match="weights: expected rows of numbers, got"):
        Weights([["a"]])  # type: ignore[list-item]
