"""Several optimisers in one context: a step is one step of each, and each has its own part."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from local_jobs import ALL_METHODS, METHODS
from local_workers import all_equal, batch, small_model, weights
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gradwire.errors import ConfigError
from gradwire.local import DiLoCo, simulated
from gradwire.local.base import LocalMethod

every_method = pytest.mark.parametrize("name", sorted(ALL_METHODS))


def matrices_and_vectors(model: nn.Module) -> list[Optimizer]:
    """Returns an optimiser of the matrices, and AdamW for the biases."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    return [SGD(matrices, lr=0.05, momentum=0.9), AdamW(vectors, lr=0.003)]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    _, adamw = matrices_and_vectors(model)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [torch.optim.Muon(matrices, lr=0.02), adamw]


def two_sgds(model: nn.Module) -> list[Optimizer]:
    first, *others = model.parameters()
    return [SGD([first], lr=0.1), SGD(others, lr=0.1)]


def one_sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1)]


def build(name: str, model: nn.Module, optimizers: Any) -> LocalMethod:
    method, args, settings = ALL_METHODS[name]
    return method(model, optimizers, *args, **settings, process_group=simulated(1)[0])


class SeveralRun:
    """Two simulated workers with several optimisers each."""

    def __init__(self, name: str, make: Callable[[nn.Module], Sequence[Optimizer]]) -> None:
        method, args, settings = METHODS[name]
        self.models = [small_model() for _ in range(2)]
        self.optimizers = [make(model) for model in self.models]
        rows = zip(self.models, self.optimizers, simulated(2), strict=True)
        self.workers = [method(m, o, *args, **settings, process_group=g) for m, o, g in rows]

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            for rank, (model, optimizers) in enumerate(
                zip(self.models, self.optimizers, strict=True)
            ):
                inputs, targets = batch(number, rank)
                model.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                for optimizer in optimizers:
                    optimizer.step()

    def weights(self) -> list[Tensor]:
        return [weights(model) for model in self.models]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_two_optimisers_are_as_one_with_all_parameters(name: str) -> None:
    found = []
    for make in (one_sgd, two_sgds):
        run = SeveralRun(name, make)
        with run.workers[0], run.workers[1]:
            run.train(0, 9)
        found.append(run.weights())
        assert run.workers[0].stats()["steps"] == 9
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
def test_muon_for_matrices_and_adamw_for_the_rest() -> None:
    run = SeveralRun("diloco", muon_and_adamw)
    with run.workers[0], run.workers[1]:
        run.train(0, 3)
        assert not all_equal(run.weights())
        run.train(3, 4)
        assert all_equal(run.weights())
    assert run.workers[0].stats()["syncs"] == 1


@every_method
def test_a_parameter_that_no_optimiser_covers(name: str) -> None:
    model = small_model()
    sgd, _ = matrices_and_vectors(model)
    method = ALL_METHODS[name][0].__name__
    what = r"2 trainable parameters of the model are not in the optimiser: 0\.bias, 2\.bias"
    with pytest.raises(ConfigError, match=f"^{method}: {what}"):
        build(name, model, [sgd])


@every_method
def test_a_parameter_in_two_optimisers(name: str) -> None:
    model = small_model()
    everything = AdamW(model.parameters())
    method = ALL_METHODS[name][0].__name__
    for others, numbers in (
        (matrices_and_vectors(model), r"optimiser 0 \(SGD\) and optimiser 2 \(AdamW\)"),
        ([everything], r"optimiser 0 \(AdamW\) and optimiser 1 \(AdamW\)"),
    ):
        message = rf"^{method}: parameter '0\.weight' is in {numbers}; each parameter must be in"
        with pytest.raises(ConfigError, match=message):
            build(name, model, [*others, everything])


def test_lists_that_are_none_of_optimisers() -> None:
    model = small_model()
    sgd = SGD(model.parameters(), lr=0.1)
    frozen = SGD([nn.Parameter(torch.zeros(2), requires_grad=False)], lr=0.1)
    for given, message in (
        ([], "got an empty list of them"),
        ([sgd, None], "a model and its optimiser, in this order, got Sequential and SGD, NoneType"),
        ([sgd, frozen], r"optimiser 1 \(SGD\) has no trainable parameter of the model; leave it"),
    ):
        with pytest.raises(ConfigError, match=message):
            build("diloco", model, given)


def test_a_wrong_interleaving_is_refused_before_the_step() -> None:
    run = SeveralRun("diloco", two_sgds)
    first, second = run.optimizers[0]
    with run.workers[0] as worker, run.workers[1]:
        run.train(0, 1)
        first.step()
        before = weights(run.models[0])
        message = (
            r"^DiLoCo: optimiser 0 \(SGD\) steps again before optimiser 1 \(SGD\) has stepped, but "
        )
        with pytest.raises(ConfigError, match=message):
            first.step()
        assert torch.equal(weights(run.models[0]), before)
        message = r"^DiLoCo: state_dict\(\) is called before optimiser 1 \(SGD\) has stepped$"
        with pytest.raises(ConfigError, match=message):
            worker.state_dict()
        second.step()
        assert worker.stats()["steps"] == 2
        worker.state_dict()
    # The context is over, and with it the rule.
    first.step()
    first.step()


@every_method
def test_an_optimiser_in_two_contexts(name: str) -> None:
    model = small_model()
    sgd, adam = two_sgds(model)
    method = ALL_METHODS[name][0].__name__
    with build(name, model, [sgd, adam]):
        second = build("diloco", model, [adam, sgd])
        message = rf"^DiLoCo: optimiser 0 \(SGD\) is in the context of a {method} already; end that"
        with pytest.raises(ConfigError, match=message), second:
            pass
    with second:
        pass


def test_resume_with_several_optimisers_is_bitwise() -> None:
    whole = SeveralRun("sparseloco", matrices_and_vectors)
    with whole.workers[0], whole.workers[1]:
        whole.train(0, 6)
        states = [
            (m.state_dict(), [o.state_dict() for o in os], w.state_dict())
            for m, os, w in zip(whole.models, whole.optimizers, whole.workers, strict=True)
        ]
        states = torch.utils._pytree.tree_map(
            lambda x: x.clone() if isinstance(x, Tensor) else x, states
        )
        whole.train(6, 10)
    again = SeveralRun("sparseloco", matrices_and_vectors)
    for rank, (model, optimizers, worker) in enumerate(states):
        again.models[rank].load_state_dict(model)
        for optimizer, state in zip(again.optimizers[rank], optimizers, strict=True):
            optimizer.load_state_dict(state)
        again.workers[rank].load_state_dict(worker)
    with again.workers[0], again.workers[1]:
        again.train(6, 10)
    for one, two in zip(whole.weights(), again.weights(), strict=True):
        assert torch.equal(one, two)


def test_the_largest_learning_rate_decides_about_residuals() -> None:
    model = small_model()
    optimizers = two_sgds(model)
    worker: Any = DiLoCo(model, optimizers, sync_every=1, process_group=simulated(1)[0])
    optimizers[1].param_groups[0]["lr"] = 0.5
    with worker:
        for optimizer in optimizers:
            optimizer.step()
        assert float(worker.state_dict()["rank0"]["tensors"]["rate"]["last"]) == 0.5
