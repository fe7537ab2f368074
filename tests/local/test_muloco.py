"""MuLoCo: DiLoCo with torch's Muon inside, its error feedback, and the parameters of Muon."""

import pytest
import torch
from local_workers import SimulatedRun, all_equal, small_model, weights
from torch import nn
from torch.optim import AdamW, Optimizer

from gradwire.errors import ConfigError
from gradwire.local import DiLoCo, MuLoCo, muon_and_adamw

with_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")


class Several(list[Optimizer]):
    """Optimisers that step one after the other."""

    def zero_grad(self) -> None:
        for one in self:
            one.zero_grad()

    def step(self) -> None:
        for one in self:
            one.step()


def recipe(model: nn.Module) -> Several:
    return Several(muon_and_adamw(model, 0.01))


def by_hand(model: nn.Module) -> Several:
    """Muon for the first matrix; the last is the output layer, which is AdamW's."""
    parameters = dict(model.named_parameters())
    muon = torch.optim.Muon(
        [parameters.pop("0.weight")],
        0.01,
        weight_decay=0.01,
        momentum=0.9,
        adjust_lr_fn="match_rms_adamw",
    )
    return Several([muon, AdamW(parameters.values(), 0.01, betas=(0.9, 0.95), weight_decay=0.0)])


@with_muon
def test_it_is_diloco_with_torch_muon_inside() -> None:
    with SimulatedRun(MuLoCo, sync_every=3, optimizer=recipe) as ours:  # type: ignore[arg-type]
        ours.train(8)
    outer = {"outer_lr": 0.8, "outer_momentum": 0.9, "nesterov": True}
    with SimulatedRun(DiLoCo, sync_every=3, optimizer=by_hand, **outer) as theirs:  # type: ignore[arg-type]
        theirs.train(8)
    pairs = zip(ours.weights(), theirs.weights(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not torch.equal(ours.weights()[0], weights(small_model()))


@with_muon
def test_two_bits_with_error_feedback() -> None:
    settings = {"sync_every": 4, "optimizer": recipe, "outer_momentum": 0.3}
    with SimulatedRun(MuLoCo, **settings) as whole:  # type: ignore[arg-type]
        dense = whole.train(60)
    with SimulatedRun(MuLoCo, "codebook:bits=2", **settings) as run:  # type: ignore[arg-type]
        losses = run.train(60)
        stats = run.workers[0].stats()
        [engine] = run.workers[0]._engines()
    assert all_equal(run.weights())
    assert sum(losses[-5:]) < 1.2 * sum(dense[-5:]) < 0.8 * 5 * losses[0]
    assert stats["memory"] == "residual:decay=0.9"
    kept = [lane.memory_state.get("residual") for lane in engine.lanes.values()]
    assert [residual is not None for residual in kept] == [True, False, True, False]


@with_muon
def test_the_default_matrices_of_muon() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(10, 8),
            "hidden": nn.Linear(8, 8),
            "conv": nn.Conv2d(8, 8, 3),
            "head": nn.Linear(8, 10),
        }
    )
    muon, adamw = muon_and_adamw(model, 0.02, adamw_lr=0.001)
    assert muon.param_groups[0]["params"] == [model["hidden"].weight]
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.02, 0.001)
    assert len(adamw.param_groups[0]["params"]) == 6
    [only] = muon_and_adamw(nn.Linear(4, 4, bias=False), matrices=lambda name, p: True)
    assert isinstance(only, torch.optim.Muon)


@with_muon
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bias", "matrices must choose parameters of two or more dimensions, got 'bias'"),
        ("weight", "torch's Muon takes parameters of two dimensions, got 'weight'"),
    ],
)
def test_what_muon_cannot_take_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"muon_and_adamw: {text}"):
        muon_and_adamw(nn.Conv2d(4, 4, 3), matrices=lambda found, _: found == name)


@with_muon
def test_a_parameter_without_an_optimiser_is_an_error() -> None:
    with pytest.raises(ConfigError, match="MuLoCo: 3 trainable parameters of the model are not in"):
        SimulatedRun(MuLoCo, optimizer=lambda model: recipe(model)[:1])  # type: ignore[arg-type]


def test_a_torch_without_muon_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ConfigError, match=r"torch has Muon since 2\.9, this is"):
        muon_and_adamw(nn.Linear(4, 4))
