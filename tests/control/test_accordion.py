"""Accordion's checks, computed by hand, and its runs on simulated ranks."""

import math

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.control.accordion import Regimes
from gradwire.errors import ConfigError

SHAPES = {"w": (64, 40), "v": (50, 60), "b": (40,)}
RULE = "accordion:low=0.5,high=0.1,interval=2"


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


def pilot(run: gradwire.Simulation, rank: int = 0) -> Regimes:
    helm = run.workers[rank].helm
    assert helm is not None
    assert isinstance(helm.pilot, Regimes)
    return helm.pilot


def levels(run: gradwire.Simulation) -> tuple[str, str]:
    found = [
        (pilot(run, rank).known.levels["w"], pilot(run, rank).known.levels["v"]) for rank in (0, 1)
    ]
    assert found[0] == found[1]
    return found[0]


def epoch(run: gradwire.Simulation, w: float, v: float, lr: float | None = None) -> None:
    """Two steps, of which the check sees the sum."""
    for _ in range(2):
        run.step(constant(w, v))
    run.epoch_ended(lr)


def test_regimes_by_hand() -> None:
    run = run_of(RULE)
    assert levels(run) == ("low", "low")
    epoch(run, 1.0, 1.0)  # epoch 0 is checked: the first, so all stay low
    run.step(constant(9.0, 9.0))
    assert levels(run) == ("low", "low")
    # Ranks 0 and 1 have sums of 2 and 6 in each of 2560 entries: their norms' mean.
    assert pilot(run).known.norms["w"] == pytest.approx(4 * math.sqrt(2560))
    run.epoch_ended()  # epoch 1 is not checked
    epoch(run, 1.2, 1.6)  # epoch 2: 20 % against 60 %
    run.step(constant(1.0, 1.0))
    assert levels(run) == ("high", "low")
    lane = run.workers[0].lanes["w"]
    assert lane.compressor == gradwire.parse("topk:ratio=0.1")
    assert run.workers[0].lanes["v"].compressor == gradwire.parse("topk:ratio=0.5")
    assert pilot(run).known.norms["v"] == pytest.approx(1.6 * 4 * math.sqrt(3000))


def test_the_check_counts_from_the_step_after_next_and_costs_no_call() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    epoch(run, 1.0, 1.0)
    epoch(run, 1.0, 1.0)
    assert levels(run) == ("low", "low")
    before = run.network.meters[0].calls
    run.step(constant(1.0, 1.0))
    told = run.network.meters[0].calls - before
    assert levels(run) == ("high", "high")
    before = run.network.meters[0].calls
    run.step(constant(1.0, 1.0))
    assert run.network.meters[0].calls - before == told


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
            worker.rate_changed(0.1, 0.01)
            worker.epoch_ended(None)
        else:
            worker.epoch_ended(None)
            worker.rate_changed(0.1, 0.01)
    assert levels(run) == ("low", "low")
    run.step(constant(1.0, 1.0))  # the check of that epoch
    assert levels(run) == ("low", "low")
    run.step(constant(1.0, 1.0))
    run.epoch_ended()
    run.step(constant(1.0, 1.0))
    assert levels(run) == ("high", "high")


def test_rates_may_be_told_with_the_epoch() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    epoch(run, 1.0, 1.0, lr=0.1)
    epoch(run, 1.0, 1.0, lr=0.1)
    run.step(constant(1.0, 1.0))
    assert levels(run) == ("high", "high")
    run.epoch_ended(0.01)
    assert levels(run) == ("low", "low")


def test_layers_that_were_silent_are_critical() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    epoch(run, 0.0, 1.0)
    epoch(run, 1.0, 1.0)
    run.step(constant(1.0, 1.0))
    assert levels(run) == ("low", "high")


def test_an_epoch_of_zeros_says_nothing() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    for _ in range(2):
        epoch(run, 1.0, 1.0)
    run.step(constant(1.0, 1.0))
    known = dict(pilot(run).known.norms)
    assert levels(run) == ("high", "high")
    run.step(constant(1.0, 1.0))
    run.epoch_ended()
    for _ in range(2):
        epoch(run, 0.0, 0.0)
    run.step(constant(0.0, 0.0))
    assert levels(run) == ("high", "high")
    assert pilot(run).known.norms == pytest.approx(known)


def test_spoilt_steps_do_not_count() -> None:
    run, clean = run_of(RULE), run_of(RULE)
    spoilt = constant(5.0, 5.0)
    spoilt[1]["w"][0, 0] = float("nan")
    for one in (run, clean):
        one.step(constant(1.0, 1.0))
    run.step(spoilt)
    run.epoch_ended()
    clean.epoch_ended()
    run.step(spoilt)
    for one in (run, clean):
        one.step(constant(1.0, 1.0))
    assert pilot(run).known.norms == pilot(clean).known.norms
    assert pilot(run).known.norms


def test_epochs_of_so_many_steps_and_a_hint_for_the_batch() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1,epoch_steps=2,accumulate_high=8")
    hints = []
    for _ in range(5):
        run.step(constant(1.0, 1.0))
        explained = run.stats()["controller"]
        assert isinstance(explained, dict)
        hints.append(explained["accumulate"])
    assert hints == [1, 1, 1, 1, 8]
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
def test_levels_of_the_batch_alone(spec: str) -> None:
    """As in the paper's third table: nothing else is steered, whatever the method."""
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
    # Epochs 0 and 1 batch by batch, and the step that tells of them; 8 at a time from then on.
    assert found[:33] == [1] * 33
    assert set(found[33:]) == {8}
    assert pilot(run).known.norms["w"] == pytest.approx(16 * 2 * math.sqrt(2560))


def test_spoilt_steps_do_not_count_where_nothing_is_compressed() -> None:
    run = run_of("accordion:setting=batch,low=1,high=8,interval=1", "none")
    epoch(run, 1.0, 1.0)
    spoilt = constant(5.0, 5.0)
    spoilt[1]["w"][0, 0] = float("nan")
    run.step(spoilt)
    assert run.stats()["skipped"] == 1
    assert pilot(run).known.norms == {}
    run.step(constant(1.0, 1.0))
    assert pilot(run).known.norms["w"] == pytest.approx(4 * math.sqrt(2560))


def test_levels_of_a_rank() -> None:
    run = run_of("accordion:setting=rank,low=4,high=1,interval=1,epoch_steps=1", "powersgd:rank=2")
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("powersgd:rank=4")
    for _ in range(3):
        run.step(constant(1.0, 1.0))
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("powersgd")


def test_norms_follow_the_loss_scale() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    epoch(run, 1.0, 1.0)
    for worker in run.workers:
        worker.follow_loss_scale(4.0)
    epoch(run, 4.0, 4.0)
    run.step(constant(4.0, 4.0))
    assert levels(run) == ("high", "high")


def test_resumes_to_the_bit() -> None:
    def gradients(step: int) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(step)
        draw = lambda shape: torch.randn(shape, generator=generator) * (1 + step % 3)  # noqa: E731
        return [{n: draw(shape) for n, shape in SHAPES.items()} for _ in range(2)]

    rule = "accordion:low=0.5,high=0.1,interval=1,epoch_steps=3,eta=0.3"
    whole = run_of(rule)
    outs = [whole.step(gradients(step))["w"] for step in range(14)]
    for cut in (5, 6):
        first, second = run_of(rule), run_of(rule)
        for step in range(cut):
            first.step(gradients(step))
        second.load_state_dict(first.state_dict())  # type: ignore[arg-type]
        for step in range(cut, 14):
            assert torch.equal(second.step(gradients(step))["w"], outs[step])
        assert second.stats()["controller"] == whole.stats()["controller"]


def test_switch_keeps_what_was_seen() -> None:
    run = run_of("accordion:low=0.5,high=0.1,interval=1")
    epoch(run, 1.0, 1.0)
    epoch(run, 1.0, 1.0)
    run.step(constant(1.0, 1.0))
    run.switch("redsync:ratio=0.3")
    assert levels(run) == ("high", "high")
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("redsync:ratio=0.1")
    last = pilot(run).log.decisions[-1]
    assert last == (5, "low: 0 of 2 layers", "another method, levels stay")


def test_both_levels_must_go_with_the_memory() -> None:
    rule, spec = "accordion:setting=bits,low=8,high=2", "qsgd:bits=8,bucket=4096"
    refused = "accordion: qsgd:bits=2,bucket=4096 does not go with memory 'residual'"
    tensors = {"w": torch.zeros(64, 40)}
    with pytest.raises(ConfigError, match=refused):
        gradwire.simulate(tensors, spec, workers=2, memory="residual", controller=rule)
    run = run_of(rule, spec)
    with pytest.raises(ConfigError, match=refused):
        run.switch(spec, memory="residual")


BAD = {
    "accordion:low=0.1,high=0.5": "low must say more",
    "accordion:low=0.1,high=0.1": "low must say more",
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


def test_what_is_no_number_or_would_be_rounded_is_named() -> None:
    with pytest.raises(ConfigError, match="accordion: low must be a number, got '1'"):
        gradwire.Accordion(low="1", high=8, setting="batch")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"powersgd: rank must be whole, got 2\.6"):
        run_of("accordion:low=2.6,high=1,setting=rank", "powersgd:rank=2")
