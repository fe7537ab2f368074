"""Models that a local method cannot synchronise are refused by name, by all methods alike."""

import inspect
import pkgutil
from importlib import import_module
from typing import Any

import pytest
import torch
from local_jobs import ALL_METHODS
from local_workers import SimulatedRun, all_equal, small_model
from refusal_jobs import (
    copies_in_a_context,
    forward_through_compiled_ddp,
    forward_through_ddp,
    refused_constructions,
    trained_in_form,
    trained_on_islands,
    trained_without_ddp_exchange,
)
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import gradwire.local
from gradwire.errors import ConfigError
from gradwire.local import LocalSGD, simulated
from gradwire.local.base import LocalMethod
from processes import Ranks

every_method = pytest.mark.parametrize("name", sorted(ALL_METHODS))


def simulated_run(name: str, **settings: Any) -> SimulatedRun:
    method, args, own = ALL_METHODS[name]
    return SimulatedRun(method, *args, **{**own, **settings})


def test_the_tests_have_all_methods() -> None:
    modules = [info.name for info in pkgutil.iter_modules(gradwire.local.__path__)]
    classes = {
        found
        for name in modules
        for _, found in inspect.getmembers(import_module(f"gradwire.local.{name}"), inspect.isclass)
        if issubclass(found, LocalMethod)
    }
    bases = {base for found in classes for base in found.__bases__}
    assert classes - bases == {method for method, _, _ in ALL_METHODS.values()}


def weights_only(model: nn.Module) -> Optimizer:
    """Returns an optimiser of matrices, as there are, which leaves the biases to another one."""
    return SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1)


@every_method
def test_trainable_parameters_that_the_optimiser_does_not_have(name: str) -> None:
    method = ALL_METHODS[name][0].__name__
    what = r"2 trainable parameters of the model are not in the optimiser: 0\.bias, 2\.bias"
    with pytest.raises(ConfigError, match=rf"^{method}: {what}.* requires_grad_\(False\)"):
        simulated_run(name, optimizer=weights_only)


def test_only_the_first_of_many_are_named() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    with pytest.raises(ConfigError, match=r"LocalSGD: 9 .*: 0\.bias, 1\.bias, .* and 6 more"):
        LocalSGD(model, weights_only(model), sync_every=4, process_group=simulated(1)[0])


@every_method
def test_parameters_that_are_not_in_the_model(name: str) -> None:
    def with_others(model: nn.Module) -> Optimizer:
        other = nn.Parameter(torch.zeros(3, 5))
        return SGD([*model.parameters(), other], lr=0.1)

    method = ALL_METHODS[name][0].__name__
    what = r"1 trainable parameters of the optimiser are not in the model: one of shape \(3, 5\)"
    with pytest.raises(ConfigError, match=rf"^{method}: {what}"):
        simulated_run(name, optimizer=with_others)


def frozen_bias() -> nn.Sequential:
    model = small_model()
    model[0].bias.requires_grad_(False)
    return model


@every_method
@pytest.mark.parametrize("change", ["unfrozen", "new", "replaced"])
def test_parameters_that_are_trained_later(name: str, change: str) -> None:
    """They are found at the next sync, though the optimiser has not changed."""
    with simulated_run(name, size=1, model=frozen_bias, optimizer=weights_and_last_bias) as run:
        run.train(4)
        model: Any = run.models[0]
        if change == "unfrozen":
            model[0].bias.requires_grad_(True)
        elif change == "new":
            model.extra = nn.Parameter(torch.zeros(3))
        else:
            model[2] = nn.Linear(48, 32)
        expected = {"unfrozen": "0.bias", "new": "extra", "replaced": "2.weight, 2.bias"}[change]
        method = ALL_METHODS[name][0].__name__
        what = f"{method}: .*since the start .*not in the optimiser: {expected}"
        with pytest.raises(ConfigError, match=what):
            run.train(4, first=4)
        assert run.workers[0].steps == 7


@every_method
def test_parameters_that_are_trained_before_the_context(name: str) -> None:
    run = simulated_run(name, size=1, model=frozen_bias, optimizer=weights_and_last_bias)
    run.models[0].get_parameter("0.bias").requires_grad_(True)
    with pytest.raises(ConfigError, match=r"not in the optimiser: 0\.bias"), run:
        pass


def weights_and_last_bias(model: nn.Module) -> Optimizer:
    return SGD([p for n, p in model.named_parameters() if n != "0.bias"], lr=0.1)


class Mixed(nn.Module):
    """A model with tied weights, a frozen layer, buffers, and parameters without a gradient."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.norm, self.last = nn.BatchNorm1d(40), nn.Linear(40, 32)
        self.unused = nn.Linear(40, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x).tanh()) + self.frozen(x)
        return self.last(self.norm(hidden))  # type: ignore[no-any-return]


def mixed_model() -> nn.Module:
    torch.manual_seed(0)
    return Mixed()


@every_method
@pytest.mark.parametrize("frozen_in_optimizer", [True, False])
def test_tied_frozen_and_unused_parameters_and_buffers(
    name: str, frozen_in_optimizer: bool
) -> None:
    def optimizer(model: nn.Module) -> Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad or frozen_in_optimizer]
        return SGD(parameters, lr=0.02)

    start = mixed_model().state_dict()
    unused = start["unused.weight"]
    if name == "diloco-bf16":
        # Parameters are rounded once, when the context is entered.
        unused = unused.bfloat16().float()
    with simulated_run(name, model=mixed_model, optimizer=optimizer) as run:
        losses = run.train(24)
    assert losses[-1] < losses[0]
    for model in run.models:
        assert isinstance(model, Mixed)
        assert model.first.weight is model.second.weight
        assert torch.equal(model.frozen.weight, start["frozen.weight"])
        torch.testing.assert_close(model.unused.weight.detach(), unused)
    assert not torch.equal(run.models[0].state_dict()["first.weight"], start["first.weight"])


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2 unsharded", "tensor parallel"])
def test_a_model_sharded_over_all_workers(two_ranks: Ranks, kind: str) -> None:
    where = "0.weight is sharded over ranks [0, 1] (Shard(dim=0) on mesh dimension 0), but [0, 1]"
    for found in two_ranks.run(refused_constructions, kind):
        for name, text in found.items():
            method = ALL_METHODS[name][0].__name__
            if name == "async":
                assert text.startswith(f"{method}: 0.weight is a DTensor, and this method takes")
            else:
                assert text.startswith(f"{method}: {where} of them are workers")


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1 original"])
def test_flat_parameters(two_ranks: Ranks, kind: str) -> None:
    for found in two_ranks.run(refused_constructions, kind):
        for name, text in found.items():
            method = ALL_METHODS[name][0].__name__
            assert text.startswith(f"{method}: the model is a FullyShardedDataParallel (FSDP1)")
            assert "use fully_shard" in text


@pytest.mark.parametrize("kind", ["ddp", "compiled ddp", "ddp inside"])
def test_a_ddp_of_all_workers(two_ranks: Ranks, kind: str) -> None:
    where = {"ddp": "the model", "compiled ddp": "_orig_mod", "ddp inside": "0"}[kind]
    for found in two_ranks.run(refused_constructions, kind):
        for name, text in found.items():
            method = ALL_METHODS[name][0].__name__
            ranks = "over ranks [0, 1]"
            assert text.startswith(f"{method}: {where} is a DistributedDataParallel {ranks}")
            assert "process_group" in text


@pytest.mark.parametrize("name", ["cser", "diloco", "streaming", "async"])
def test_training_through_a_ddp_of_all_workers(four_ranks: Ranks, name: str) -> None:
    method = ALL_METHODS[name][0].__name__
    for texts in four_ranks.run(forward_through_ddp, name):
        for text in texts:
            assert text.startswith(f"{method}: the model is called by a DistributedDataParallel")


def test_a_compiled_model_in_a_ddp(two_ranks: Ranks) -> None:
    """A DDP of one rank alone is legal, and its compiled graph must not break."""
    for refused, legal in two_ranks.run(forward_through_compiled_ddp):
        assert "LocalSGD: the model is called by a DistributedDataParallel" in refused
        assert legal == ""


@pytest.mark.parametrize("gives_ddp", [True, False])
@pytest.mark.parametrize("among_all", [True, False])
def test_ddp_inside_islands(four_ranks: Ranks, gives_ddp: bool, among_all: bool) -> None:
    """Islands train apart between syncs, and their two ranks never differ."""
    results = four_ranks.run(trained_on_islands, gives_ddp, among_all)
    for sync in range(2):
        before = [before[sync] for before, _ in results]
        assert torch.equal(before[0], before[1])
        assert torch.equal(before[2], before[3])
        assert not torch.equal(before[0], before[2])
        assert all_equal([after[sync] for _, after in results])


def test_a_ddp_that_exchanges_nothing(four_ranks: Ranks) -> None:
    for wrapped, plain in four_ranks.run(trained_without_ddp_exchange, LocalSGD):
        assert torch.equal(wrapped, plain)


def test_models_in_a_context_can_be_copied_and_saved(four_ranks: Ranks) -> None:
    """Before and after the first step; copies may be trained with DDP."""
    assert four_ranks.run(copies_in_a_context) == [[True] * 4] * 4


@pytest.mark.parametrize("form", ["compiled", "scripted"])
def test_compiled_and_scripted_models(two_ranks: Ranks, form: str) -> None:
    for ours, plain in two_ranks.run(trained_in_form, form):
        torch.testing.assert_close(ours, plain)
