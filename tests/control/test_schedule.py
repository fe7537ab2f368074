"""Schedules: hand-computed ramps, and the settings of lanes."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.checkpoint.json_state import to_json
from gradwire.compressors.powersgd import PowerSGD
from gradwire.control.schedule import Schedule
from gradwire.errors import ConfigError

SHAPES = {"w": (64, 40), "b": (40,)}


def gradients(step: int, workers: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()} for _ in range(workers)
    ]


def make(spec: str, controller: str, **options: object) -> gradwire.Simulation:
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return gradwire.simulate(tensors, spec, workers=3, controller=controller, **options)  # type: ignore[arg-type]


def decisions(run: gradwire.Simulation) -> list[tuple[int, str]]:
    explained = run.stats()["controller"]
    assert isinstance(explained, dict)
    return [(row["step"], row["setting"]) for row in explained["decisions"]]


def test_the_warm_up_of_dgc() -> None:
    controller = Schedule(first=0.25, last=0.001, stages=5, length=5, unit="epoch")
    values = [controller.value(epoch) for epoch in range(7)]
    expected = [0.25, 0.0629, 0.0158, 0.00398, 0.001, 0.001, 0.001]
    assert values == pytest.approx(expected, rel=0.01)


def test_a_linear_ramp_after_a_dense_start() -> None:
    controller = Schedule(first=1.0, last=0.2, stages=3, length=6, after=2, shape="linear")
    values = [controller.value(step) for step in range(9)]
    assert values == [None, None, *[pytest.approx(v) for v in (1, 1, 0.6, 0.6, 0.2, 0.2, 0.2)]]


def test_any_ramp_by_its_plateaus() -> None:
    controller = Schedule(first=0.1, last=0.01, via="0.5/0.02", length=8, after=1)
    values = [controller.value(step) for step in range(11)]
    assert values == [None, 0.1, 0.1, 0.5, 0.5, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01]
    run = make("topk:ratio=0.3", "schedule:first=0.1,last=0.01,via=0.5/0.02,length=4")
    found = []
    for step in range(5):
        found.append(run.workers[0].lanes["w"].compressor)
        run.step(gradients(step))
    ratios = (0.1, 0.5, 0.02, 0.01, 0.01)
    assert found == [gradwire.parse(f"topk:ratio={ratio}") for ratio in ratios]


def test_dense_first_then_compressed_with_the_same_memory() -> None:
    run = make("topk:ratio=0.01,values=fp32", "schedule:last=0.05,after=2")
    for step in range(2):
        grads = gradients(step)
        mean = run.step(grads)
        torch.testing.assert_close(mean["w"], torch.stack([g["w"] for g in grads]).mean(0))
        assert run.stats()["residual_norm"] == 0
    run.step(gradients(2))
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("topk:ratio=0.05,values=fp32")
    before = [w.lanes["w"].memory_state["residual"].clone() for w in run.workers]
    grads = gradients(3)
    mean = run.step(grads)["w"]
    left = [w.lanes["w"].memory_state["residual"] for w in run.workers]
    totals = torch.stack([g["w"].view(-1) + r for g, r in zip(grads, before, strict=True)])
    torch.testing.assert_close(mean.view(-1), (totals - torch.stack(left)).mean(0))


def test_stats_list_settings_with_steps_and_reasons() -> None:
    run = make("topk:ratio=0.01", "schedule:last=0.05,first=0.2,stages=2,length=4,after=1")
    for step in range(6):
        run.step(gradients(step))
    rows = [(0, "none"), (1, "topk:ratio=0.2"), (3, "topk:ratio=0.05")]
    assert decisions(run) == rows
    explained = run.stats()["controller"]
    assert isinstance(explained, dict)
    assert explained["setting"] == "topk:ratio=0.05"
    assert explained["decisions"][2]["reason"] == "3 steps have passed"


def test_a_skipped_step_is_not_counted() -> None:
    run = make("topk:ratio=0.01", "schedule:last=0.05,after=2")
    nonfinite = gradients(0)
    nonfinite[1]["w"][0, 0] = float("nan")
    run.step(nonfinite)
    run.step(gradients(1))
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("none")
    run.step(gradients(2))
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("topk:ratio=0.05")


def test_epochs_are_counted_by_epoch_ended() -> None:
    run = make("topk:ratio=0.01", "schedule:last=0.05,after=1,unit=epoch")
    run.step(gradients(0))
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("none")
    run.epoch_ended()
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("topk:ratio=0.05")


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
def test_resumes_to_the_bit(exchange: str) -> None:
    controller = "schedule:last=0.02,first=0.5,stages=4,length=8,after=2"
    whole = make("topk:ratio=0.01", controller, exchange=exchange)
    outs = [whole.step(gradients(step))["w"] for step in range(9)]
    first, second = (make("topk:ratio=0.01", controller, exchange=exchange) for _ in range(2))
    for step in range(5):
        first.step(gradients(step))
    second.load_state_dict(first.state_dict())  # type: ignore[arg-type]
    for step in range(5, 9):
        assert torch.equal(second.step(gradients(step))["w"], outs[step])
    assert second.stats()["controller"] == whole.stats()["controller"]


def test_a_low_rank_method_keeps_the_columns_that_fit() -> None:
    run = make("powersgd:rank=4", "schedule:setting=rank,first=4,last=1,stages=2,length=6")
    run.step(gradients(0))
    lane = run.workers[0].lanes["w"]
    before = lane.aggregator_state["q"].clone()
    assert before.shape == (40, 4)
    for rank in (2, 3):
        method = PowerSGD(rank)
        lane.reconfigure(method, method)
        assert lane.aggregator_state["q"].shape == (40, rank)
        assert torch.equal(lane.aggregator_state["q"][:, :2], before[:, :2])


def test_a_low_rank_method_follows_a_schedule() -> None:
    run = make("powersgd:rank=4", "schedule:setting=rank,first=4,last=1,stages=2,length=4")
    for step in range(3):
        run.step(gradients(step))
    assert run.workers[0].lanes["w"].compressor == PowerSGD(1)
    assert run.workers[0].lanes["w"].aggregator_state["q"].shape == (40, 1)


def test_switch_keeps_the_schedule() -> None:
    run = make("topk:ratio=0.01", "schedule:last=0.05,after=3")
    run.step(gradients(0))
    with pytest.raises(ConfigError, match="efsign has no setting 'ratio' to control"):
        run.switch("efsign")
    run.switch("redsync:ratio=0.5")
    assert decisions(run) == [(0, "none"), (1, "none")]
    run.step(gradients(1))
    run.step(gradients(2))
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("redsync:ratio=0.05")


def test_states_with_and_without_a_controller_are_not_mixed_up() -> None:
    plain = gradwire.simulate({"w": torch.zeros(64, 40)}, "topk:ratio=0.01", workers=1)
    controlled = gradwire.simulate(
        {"w": torch.zeros(64, 40)}, "topk:ratio=0.01", workers=1, controller="schedule:last=0.1"
    )
    with pytest.raises(ConfigError, match="was saved with no controller"):
        controlled.load_state_dict(plain.state_dict())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="was saved with a controller"):
        plain.load_state_dict(controlled.state_dict())  # type: ignore[arg-type]


BAD = {
    "schedule": "missing parameter",
    "schedule:last=0": "positive ends",
    "schedule:last=2": "ratio must be in",
    "schedule:last=0.1,stages=0": "stages must be at least 1",
    "schedule:last=0.1,stages=5,length=3": "length must be at least 5",
    "schedule:last=0.1,after=-1": "after must be at least 0",
    "schedule:last=0.1,shape=round": "shape must be one of",
    "schedule:last=0.1,setting=rank": "no setting 'rank' to control",
    "schedule:last=0.1,setting=values": "which is not a number",
    "schedule:last=0.1,via=0.5/x,length=9": "via must be numbers",
    "schedule:last=0.1,via=0.5/2,length=9": "ratio must be in",
    "schedule:last=0.1,via=0.5,length=2": "length must be at least 3",
    "schedule:last=0.1,via=0.5,length=9,stages=3": "stages must be 1 together with via",
    "schedule:last=inf": "last must be finite, got inf",
    "schedule:last=0.1,first=nan": "first must be finite, got nan",
    "schedule:last=0.1,via=inf,length=9": "via must be finite, got inf",
    "schedule:last=0.1,length=9": "give stages= or via= for a ramp",
    "schedule:last=0.1,first=0.5": "give stages= or via= for a ramp",
    "skedule:last=0.1": "did you mean 'schedule'",
}


@pytest.mark.parametrize("controller", BAD)
def test_bad_input(controller: str) -> None:
    with pytest.raises(ConfigError, match=BAD[controller]):
        make("topk:ratio=0.01", controller)


def test_values_that_are_no_numbers_or_would_be_rounded_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule: last must be a number, got .0\.1."):
        Schedule(last="0.1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="schedule: first must be a number, got None"):
        Schedule(last=0.1, first=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"powersgd: rank must be whole, got 2\.6"):
        make("powersgd:rank=4", "schedule:setting=rank,last=2.6")
    with pytest.raises(ConfigError, match="schedule: last must be finite, got inf"):
        make("powersgd:rank=4", "schedule:setting=rank,last=inf")


@pytest.mark.parametrize("via", [5, [0.1], None, b"0.1"])
def test_via_is_a_string(via: object) -> None:
    with pytest.raises(ConfigError, match="schedule: via must be a string of numbers"):
        Schedule(last=0.01, via=via, length=10)  # type: ignore[arg-type]


LEVELS = ["last=2", "first=2,last=8,stages=2,length=4", "first=8,via=2,last=7,length=9"]


@pytest.mark.parametrize("ramp", LEVELS)
def test_every_setting_must_support_the_memory(ramp: str) -> None:
    controller = f"schedule:setting=bits,{ramp}"
    message = "schedule: qsgd:bits=2,bucket=4096 does not go with memory 'residual'"
    with pytest.raises(ConfigError, match=message):
        make("qsgd:bits=8,bucket=4096", controller, memory="residual")
    run = make("qsgd:bits=8,bucket=4096", controller, memory="none")
    run.step(gradients(0))
    with pytest.raises(ConfigError, match=message):
        run.switch("qsgd:bits=8,bucket=4096", memory="residual")
    run.step(gradients(1))
    assert run.stats()["memory"] == "none"


@pytest.mark.parametrize(
    "broken",
    [None, 5, b"{}", "garbage", to_json([]), to_json({}), to_json({"spec": "schedule:last=0.1"})],
)
def test_a_broken_state_is_refused_and_changes_nothing(broken: object) -> None:
    run = make("topk:ratio=0.01", "schedule:last=0.1")
    run.step(gradients(0))
    before, state = run.state_dict(), run.state_dict()
    state["0"]["controller"] = broken  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"^state: (a JSON part|controller)"):
        run.load_state_dict(state)  # type: ignore[arg-type]
    assert str(run.state_dict()) == str(before)


def test_a_state_of_another_version_is_refused() -> None:
    run = make("topk:ratio=0.01", "schedule:last=0.1")
    observer = run.workers[0].observer
    assert observer is not None
    for wrong in ({"state": {}}, {"timing": [0.0]}, {"log": [[1, 2]]}):
        message = r"^state: controller: this is not a state of schedule:last=0\.1"
        with pytest.raises(ConfigError, match=message):
            observer.load_state_dict({**observer.state_dict(), **wrong})
