"""Accordion's checks, computed by hand, and its runs on simulated ranks."""

import math

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.control.accordion import AccordionState
from gradwire.control.runtime import ControllerRuntime
from gradwire.errors import ConfigError

SHAPES = {"w": (64, 40), "v": (50, 60), "b": (40,)}
CONTROLLER = "accordion:low=0.5,high=0.1,interval=2"


def run_of(controller: str, spec: str = "topk:ratio=0.2", workers: int = 2) -> gradwire.Simulation:
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return gradwire.simulate(tensors, spec, workers=workers, controller=controller)


def constant(w: float, v: float, workers: int = 2) -> list[dict[str, Tensor]]:
    """Gradients that all have one value in each tensor; rank 1's are three times rank 0's."""
    sizes = {"w": w, "v": v, "b": 1.0}
    return [
        {n: torch.full(shape, sizes[n] * (1 + 2 * rank)) for n, shape in SHAPES.items()}
        for rank in range(workers)
    ]


def state_of(run: gradwire.Simulation, rank: int = 0) -> AccordionState:
    runtime = run.workers[rank].observer
    assert isinstance(runtime, ControllerRuntime)
    assert isinstance(runtime.state, AccordionState)
    return runtime.state


def levels(run: gradwire.Simulation) -> tuple[str, str]:
    found = [state_of(run, rank).regimes.levels for rank in (0, 1)]
    assert found[0] == found[1]
    return found[0]["w"], found[0]["v"]


def epoch(run: gradwire.Simulation, w: float, v: float, lr: float | None = None) -> None:
    """Runs two steps, whose sum the check reads."""
    for _ in range(2):
        run.step(constant(w, v))
    run.epoch_ended(lr)


def test_regimes_by_hand() -> None:
    run = run_of(CONTROLLER)
    assert levels(run) == ("low", "low")
    epoch(run, 1.0, 1.0)  # epoch 0 is checked: the first, so all stay low
    run.step(constant(9.0, 9.0))
    assert levels(run) == ("low", "low")
    # Ranks 0 and 1 have sums of 2 and 6 in each of 2560 entries: their norms' mean.
    assert state_of(run).regimes.norms["w"] == pytest.approx(4 * math.sqrt(2560))
    run.epoch_ended()  # epoch 1 is not checked
    epoch(run, 1.2, 1.6)  # epoch 2: 20 % against 60 %
    run.step(constant(1.0, 1.0))
    assert levels(run) == ("high", "low")
    lane = run.workers[0].lanes["w"]
    assert lane.compressor == gradwire.parse("topk:ratio=0.1")
    assert run.workers[0].lanes["v"].compressor == gradwire.parse("topk:ratio=0.5")
    assert state_of(run).regimes.norms["v"] == pytest.approx(1.6 * 4 * math.sqrt(3000))


def test_the_check_takes_effect_after_one_step_and_costs_no_call() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    epoch(run, 1.0, 1.0)
    epoch(run, 1.0, 1.0)
    assert levels(run) == ("low", "low")
    before = run.network.meters[0].calls
    run.step(constant(1.0, 1.0))
    calls = run.network.meters[0].calls - before
    assert levels(run) == ("high", "high")
    before = run.network.meters[0].calls
    run.step(constant(1.0, 1.0))
    assert run.network.meters[0].calls - before == calls


@pytest.mark.parametrize("first", ["rate", "epoch"])
def test_a_decay_of_the_learning_rate_makes_all_low_until_the_next_check(first: str) -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    epoch(run, 1.0, 1.0)
    epoch(run, 1.0, 1.0)
    run.step(constant(1.0, 1.0))
    run.step(constant(1.0, 1.0))
    assert levels(run) == ("high", "high")
    for worker in run.workers:
        if first == "rate":
            worker.learning_rate_changed(0.1, 0.01)
            worker.epoch_ended(None)
        else:
            worker.epoch_ended(None)
            worker.learning_rate_changed(0.1, 0.01)
    assert levels(run) == ("low", "low")
    run.step(constant(1.0, 1.0))  # the check of that epoch
    assert levels(run) == ("low", "low")
    run.step(constant(1.0, 1.0))
    run.epoch_ended()
    run.step(constant(1.0, 1.0))
    assert levels(run) == ("high", "high")


def test_the_learning_rate_may_be_passed_with_the_epoch() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    epoch(run, 1.0, 1.0, lr=0.1)
    epoch(run, 1.0, 1.0, lr=0.1)
    run.step(constant(1.0, 1.0))
    assert levels(run) == ("high", "high")
    run.epoch_ended(0.01)
    assert levels(run) == ("low", "low")


def test_layers_whose_gradients_were_zero_are_critical() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    epoch(run, 0.0, 1.0)
    epoch(run, 1.0, 1.0)
    run.step(constant(1.0, 1.0))
    assert levels(run) == ("low", "high")


def test_an_epoch_of_zeros_changes_nothing() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    for _ in range(2):
        epoch(run, 1.0, 1.0)
    run.step(constant(1.0, 1.0))
    known = dict(state_of(run).regimes.norms)
    assert levels(run) == ("high", "high")
    run.step(constant(1.0, 1.0))
    run.epoch_ended()
    for _ in range(2):
        epoch(run, 0.0, 0.0)
    run.step(constant(0.0, 0.0))
    assert levels(run) == ("high", "high")
    assert state_of(run).regimes.norms == pytest.approx(known)


def test_nonfinite_steps_do_not_count() -> None:
    run, clean = run_of(CONTROLLER), run_of(CONTROLLER)
    nonfinite = constant(5.0, 5.0)
    nonfinite[1]["w"][0, 0] = float("nan")
    for one in (run, clean):
        one.step(constant(1.0, 1.0))
    run.step(nonfinite)
    run.epoch_ended()
    clean.epoch_ended()
    run.step(nonfinite)
    for one in (run, clean):
        one.step(constant(1.0, 1.0))
    assert state_of(run).regimes.norms == state_of(clean).regimes.norms
    assert state_of(run).regimes.norms


def test_epochs_of_a_fixed_length_and_the_number_of_passes() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1,epoch_steps=2,accumulate_high=8")
    passes = []
    for _ in range(5):
        run.step(constant(1.0, 1.0))
        explained = run.stats()["controller"]
        assert isinstance(explained, dict)
        passes.append(explained["accumulate"])
    assert passes == [1, 1, 1, 1, 8]
    rows = [(row["step"], row["setting"]) for row in explained["decisions"]]
    assert rows[0] == (0, "low: 2 of 2 layers")
    assert rows[-1] == (5, "low: 0 of 2 layers")


def accumulate(run: gradwire.Simulation) -> int:
    explained = run.stats()["controller"]
    assert isinstance(explained, dict)
    found = explained["accumulate"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.2", "efsign"])
def test_the_batch_alone_is_controlled(spec: str) -> None:
    """As in the paper's third table: nothing else is controlled, whatever the method."""
    run = run_of("accordion:setting=batch,low=1,high=8,interval=1", spec)
    before = {name: lane.compressor for name, lane in run.workers[0].lanes.items()}
    assert accumulate(run) == 1
    epoch(run, 1.0, 1.0)
    epoch(run, 1.0, 1.0)
    run.step(constant(1.0, 1.0))
    assert levels(run) == ("high", "high")
    assert accumulate(run) == 8
    run.epoch_ended(0.1)
    run.epoch_ended(0.01)
    assert accumulate(run) == 1
    after = {name: lane.compressor for name, lane in run.workers[0].lanes.items()}
    assert after == before


def test_larger_batches_are_no_change_of_regime() -> None:
    """A gradient of 8 batches, being their mean, counts as 8 in an epoch's sum and length."""
    run = run_of("accordion:setting=batch,low=1,high=8,interval=1,epoch_steps=16", "none")
    found, batches = [], 0
    while batches < 160:
        passes = accumulate(run)
        run.step(constant(1.0, 1.0))
        batches += passes
        found.append(passes)
    # Epochs 0 and 1 batch by batch, and the step that sends their norms; 8 at a time after that.
    assert found[:33] == [1] * 33
    assert set(found[33:]) == {8}
    assert state_of(run).regimes.norms["w"] == pytest.approx(16 * 2 * math.sqrt(2560))


def test_nonfinite_steps_do_not_count_for_dense_gradients() -> None:
    run = run_of("accordion:setting=batch,low=1,high=8,interval=1", "none")
    epoch(run, 1.0, 1.0)
    nonfinite = constant(5.0, 5.0)
    nonfinite[1]["w"][0, 0] = float("nan")
    run.step(nonfinite)
    assert run.stats()["skipped"] == 1
    assert state_of(run).regimes.norms == {}
    run.step(constant(1.0, 1.0))
    assert state_of(run).regimes.norms["w"] == pytest.approx(4 * math.sqrt(2560))


def test_two_levels_of_the_rank() -> None:
    run = run_of("accordion:setting=rank,low=4,high=1,interval=1,epoch_steps=1", "powersgd:rank=2")
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("powersgd:rank=4")
    for _ in range(3):
        run.step(constant(1.0, 1.0))
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("powersgd")


def test_norms_follow_the_loss_scale() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    epoch(run, 1.0, 1.0)
    for worker in run.workers:
        worker.loss_scale_changed(4.0)
    epoch(run, 4.0, 4.0)
    run.step(constant(4.0, 4.0))
    assert levels(run) == ("high", "high")


def test_resumes_to_the_bit() -> None:
    def gradients(step: int) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(step)
        draw = lambda shape: torch.randn(shape, generator=generator) * (1 + step % 3)  # noqa: E731
        return [{n: draw(shape) for n, shape in SHAPES.items()} for _ in range(2)]

    controller = "accordion:low=0.5,high=0.1,interval=1,epoch_steps=3,eta=0.3"
    whole = run_of(controller)
    outs = [whole.step(gradients(step))["w"] for step in range(14)]
    for cut in (5, 6):
        first, second = run_of(controller), run_of(controller)
        for step in range(cut):
            first.step(gradients(step))
        second.load_state_dict(first.state_dict())  # type: ignore[arg-type]
        for step in range(cut, 14):
            assert torch.equal(second.step(gradients(step))["w"], outs[step])
        assert second.stats()["controller"] == whole.stats()["controller"]


def test_switch_keeps_the_levels() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    epoch(run, 1.0, 1.0)
    epoch(run, 1.0, 1.0)
    run.step(constant(1.0, 1.0))
    run.switch("redsync:ratio=0.3")
    assert levels(run) == ("high", "high")
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("redsync:ratio=0.1")
    last = state_of(run).log.decisions[-1]
    assert last == (5, "low: 0 of 2 layers", "new method, same levels")


def test_both_levels_must_support_the_memory() -> None:
    controller, spec = "accordion:setting=bits,low=8,high=2", "qsgd:bits=8,bucket=4096"
    message = "accordion: qsgd:bits=2,bucket=4096 does not go with memory 'residual'"
    tensors = {"w": torch.zeros(64, 40)}
    with pytest.raises(ConfigError, match=message):
        gradwire.simulate(tensors, spec, workers=2, memory="residual", controller=controller)
    run = run_of(controller, spec)
    with pytest.raises(ConfigError, match=message):
        run.switch(spec, memory="residual")


BAD = {
    "accordion:low=0.1,high=0.5": "low must send more than high",
    "accordion:low=0.1,high=0.1": "low must send more than high",
    "accordion:low=2,high=0.5": "ratio must be in",
    "accordion:low=0.5,high=0.1,eta=0": "eta must be in",
    "accordion:low=0.5,high=0.1,interval=0": "interval must be at least 1",
    "accordion:low=0.5,high=0.1,epoch_steps=-1": "epoch_steps must be at least 0",
    "accordion:low=0.5,high=0.1,accumulate_low=2": "accumulate_high must be at least 2",
    "accordion:low=4,high=1,setting=rank": "no setting 'rank' to control",
    "accordion:low=0.5": "missing parameter",
    "accordion:low=0.5,high=nan": "high must be finite, got nan",
    "accordion:low=inf,high=1,setting=rank": "low must be finite, got inf",
    "accordion:low=1,high=inf,setting=batch": "high must be finite, got inf",
    "accordion:low=8,high=1,setting=batch": "batch: passes must be whole, 1 <= low < high",
    "accordion:low=0,high=8,setting=batch": "batch: passes must be whole, 1 <= low < high",
    "accordion:low=1.5,high=8,setting=batch": "batch: passes must be whole, 1 <= low < high",
    "accordion:low=1,high=8,setting=batch,accumulate_high=4": "accumulate_low and accumulate_high",
}


@pytest.mark.parametrize("controller", BAD)
def test_bad_input(controller: str) -> None:
    with pytest.raises(ConfigError, match=BAD[controller]):
        run_of(controller)


def test_values_that_are_no_numbers_or_would_be_rounded_are_refused() -> None:
    with pytest.raises(ConfigError, match="accordion: low must be a number, got '1'"):
        gradwire.Accordion(low="1", high=8, setting="batch")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"powersgd: rank must be whole, got 2\.6"):
        run_of("accordion:low=2.6,high=1,setting=rank", "powersgd:rank=2")
