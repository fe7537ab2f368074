"""ByzSGD: conditions on numbers of nodes, contraction of models, and training among liars."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.byzsgd import ByzSGD, Nodes
from gradwire.errors import ConfigError
from lockstep import noise

SIZE = 200
OPTIMUM = noise(SIZE, seed=1)


class Noisy:
    """Gradients of a quadratic with noise that differs between workers and steps."""

    def __init__(self, scale: float) -> None:
        self.scale, self.calls = scale, 0

    def __call__(self, parameters: Mapping[str, Tensor], worker: int) -> dict[str, Tensor]:
        self.calls += 1
        return {"x": parameters["x"] - OPTIMUM + self.scale * noise(SIZE, seed=100 + self.calls)}


def distance(model: dict[str, Tensor]) -> float:
    return float((model["x"] - OPTIMUM).norm() / OPTIMUM.norm())


def start() -> dict[str, Tensor]:
    return {"x": torch.zeros(SIZE)}


@pytest.mark.parametrize("lie", ["noise:scale=100", "sign_flip:scale=10", "nan", "alie:z=3"])
def test_medians_of_medians_contract_the_models(lie: str) -> None:
    """Of seven servers one lies, with quorums of six; without steps, six rounds."""
    byz = ByzSGD(start(), Nodes(7, 1, 4, 1), server_attacks={2: lie})
    byz.models = noise(7, SIZE)
    honest = byz.models[byz.honest]
    diameters = [byz.diameter()]
    for _ in range(6):
        byz.gather()
        diameters.append(byz.diameter())
        # Liars move no entry beyond those of honest servers.
        found = byz.models[byz.honest]
        assert bool((found >= honest.amin(0) - 1e-6).all() & (found <= honest.amax(0) + 1e-6).all())
        byz.steps += 1
    assert all(after <= 0.95 * before for before, after in pairwise(diameters))
    assert diameters[-1] < 0.2 * diameters[0]


@pytest.mark.parametrize("lie", ["sign_flip:scale=10", "noise:scale=50", "inner_product:eps=5"])
def test_training_converges_with_lying_servers_and_workers(lie: str) -> None:
    byz = ByzSGD(
        start(),
        Nodes(servers=5, faulty_servers=1, workers=10, faulty_workers=3),
        gather_every=5,
        attacks={7: lie, 8: lie, 9: lie},
        server_attacks={4: "sign_flip:scale=10"},
    )
    gradient = Noisy(0.1)
    for _ in range(60):
        byz.step(gradient, 0.1)
    assert distance(byz.model()) < 0.1
    assert byz.diameter() < 0.1 * float(OPTIMUM.norm())


def test_a_plain_mean_of_the_same_gradients_does_not() -> None:
    lies = {7: "sign_flip:scale=10", 8: "sign_flip:scale=10", 9: "sign_flip:scale=10"}
    sim = gradwire.simulate(start(), "none", workers=10, exchange="gather", attacks=lies)
    gradient, x = Noisy(0.1), torch.zeros(SIZE)
    for _ in range(60):
        x = x - 0.1 * sim.step([gradient({"x": x}, worker) for worker in range(10)])["x"]
    assert distance({"x": x}) > 10


def test_without_faulty_nodes_it_is_sgd_on_the_mean() -> None:
    byz = ByzSGD(start(), Nodes(1, 0, 4, 0))
    gradient, again, x = Noisy(0.5), Noisy(0.5), torch.zeros(SIZE)
    for _ in range(3):
        byz.step(gradient, 0.1)
        x = x - 0.1 * torch.stack([again({"x": x}, w)["x"] for w in range(4)]).mean(0)
    torch.testing.assert_close(byz.model()["x"], x)


def test_models_drift_apart_between_two_gathers() -> None:
    byz = ByzSGD(start(), Nodes(5, 1, 7, 2), gather_every=4)
    gradient, found = Noisy(1.0), []
    for _ in range(4):
        byz.step(gradient, 0.1)
        found.append(byz.diameter())
    assert found[2] > found[0] > 0
    assert found[3] < found[2]


def test_bytes_are_those_of_all_quorums() -> None:
    """Workers get 4 models each, servers 5 gradients each, and 3 models of others at a gather."""
    byz = ByzSGD(start(), Nodes(5, 1, 7, 2), gather_every=2)
    gradient, message = Noisy(0.1), 4 * SIZE
    byz.step(gradient, 0.1)
    assert byz.sent_bytes == (7 * 4 + 5 * 5) * message
    byz.step(gradient, 0.1)
    assert byz.sent_bytes == 2 * (7 * 4 + 5 * 5) * message + 5 * 3 * message


def test_a_run_resumes_bitwise() -> None:
    def build() -> ByzSGD:
        lies = {0: "replay:delay=2"}
        servers = {1: "noise:scale=3"}
        nodes = Nodes(5, 1, 4, 1)
        return ByzSGD(start(), nodes, gather_every=3, attacks=lies, server_attacks=servers)

    one, two, gradient = build(), build(), Noisy(0.1)
    for _ in range(4):
        one.step(gradient, 0.1)
    two.load_state_dict(one.state_dict())
    again = Noisy(0.1)
    again.calls = gradient.calls
    for _ in range(3):
        one.step(gradient, 0.1)
        two.step(again, 0.1)
    assert torch.equal(one.models, two.models)
    assert one.sent_bytes == two.sent_bytes


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ((4, 1, 4, 1), r"faulty_servers=1 needs servers > 3 \* 1 \+ 1 = 4, got 4"),
        ((5, 1, 9, 3), r"faulty_workers=3 needs workers > 3 \* 3 = 9, got 9"),
        ((5, -1, 9, 1), "faulty_servers must be at least 0, got -1"),
        ((0, 0, 9, 1), "servers must be at least 1, got 0"),
    ],
)
def test_too_many_faulty_nodes_are_refused_by_name(
    numbers: tuple[int, int, int, int], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        Nodes(*numbers)


def test_the_least_numbers_are_accepted() -> None:
    assert Nodes(5, 1, 4, 1).model_quorum == 4
    assert Nodes(8, 2, 10, 3).gradient_quorum == 7
    assert Nodes(1, 0, 1, 0).model_quorum == 1


def test_bad_settings_are_refused_by_name() -> None:
    nodes = Nodes(5, 1, 4, 1)
    with pytest.raises(ConfigError, match="server must be 0 to 4, got 5"):
        ByzSGD(start(), nodes, server_attacks={5: "nan"})
    with pytest.raises(ConfigError, match="no attack that keeps state, got Replay"):
        ByzSGD(start(), nodes, server_attacks={0: "replay"})
    with pytest.raises(ConfigError, match="gather_every must be at least 1, got 0"):
        ByzSGD(start(), nodes, gather_every=0)
    with pytest.raises(ConfigError, match=r"worker 0 has .*\(3,\)"):
        ByzSGD(start(), nodes).step(lambda parameters, worker: {"x": torch.zeros(3)}, 0.1)


def test_a_state_of_other_numbers_is_refused() -> None:
    state = ByzSGD(start(), Nodes(5, 1, 4, 1)).state_dict()
    with pytest.raises(
        ConfigError, match=r"the state's models are \(5, 200\), expected \(1, 200\)"
    ):
        ByzSGD(start(), Nodes(1, 0, 4, 1)).load_state_dict(state)
