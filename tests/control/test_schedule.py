"""Schedules: hand-computed ramps, and what lanes make of them."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.checkpoint.json_state import seal
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
    rule = Schedule(first=0.25, last=0.001, stages=5, length=5, unit="epoch")
    values = [rule.value(epoch) for epoch in range(7)]
    expected = [0.25, 0.0629, 0.0158, 0.00398, 0.001, 0.001, 0.001]
    assert values == pytest.approx(expected, rel=0.01)


def test_a_linear_ramp_after_a_dense_start() -> None:
    rule = Schedule(first=1.0, last=0.2, stages=3, length=6, after=2, shape="linear")
    values = [rule.value(step) for step in range(9)]
    assert values == [None, None, *[pytest.approx(v) for v in (1, 1, 0.6, 0.6, 0.2, 0.2, 0.2)]]


def test_any_ramp_by_its_plateaus() -> None:
    rule = Schedule(first=0.1, last=0.01, via="0.5/0.02", length=8, after=1)
    values = [rule.value(step) for step in range(11)]
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
        given = gradients(step)
        got = run.step(given)
        torch.testing.assert_close(got["w"], torch.stack([g["w"] for g in given]).mean(0))
        assert run.stats()["residual_norm"] == 0
    run.step(gradients(2))
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("topk:ratio=0.05,values=fp32")
    before = [w.lanes["w"].memory_state["residual"].clone() for w in run.workers]
    given = gradients(3)
    got = run.step(given)["w"]
    left = [w.lanes["w"].memory_state["residual"] for w in run.workers]
    unsent_keys = torch.stack([g["w"].view(-1) + r for g, r in zip(given, before, strict=True)])
    torch.testing.assert_close(got.view(-1), (unsent_keys - torch.stack(left)).mean(0))


def test_stats_say_which_setting_when_and_why() -> None:
    run = make("topk:ratio=0.01", "schedule:last=0.05,first=0.2,stages=2,length=4,after=1")
    for step in range(6):
        run.step(gradients(step))
    rows = [(0, "none"), (1, "topk:ratio=0.2"), (3, "topk:ratio=0.05")]
    assert decisions(run) == rows
    explained = run.stats()["controller"]
    assert isinstance(explained, dict)
    assert explained["setting"] == "topk:ratio=0.05"
    assert explained["decisions"][2]["reason"] == "3 steps have passed"


def test_a_step_that_does_not_count_does_not_pass() -> None:
    run = make("topk:ratio=0.01", "schedule:last=0.05,after=2")
    spoilt = gradients(0)
    spoilt[1]["w"][0, 0] = float("nan")
    run.step(spoilt)
    run.step(gradients(1))
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("none")
    run.step(gradients(2))
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("topk:ratio=0.05")


def test_epochs_are_those_that_are_told() -> None:
    run = make("topk:ratio=0.01", "schedule:last=0.05,after=1,unit=epoch")
    run.step(gradients(0))
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("none")
    run.epoch_ended()
    assert run.workers[0].lanes["w"].compressor == gradwire.parse("topk:ratio=0.05")


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
def test_resumes_to_the_bit(exchange: str) -> None:
    rule = "schedule:last=0.02,first=0.5,stages=4,length=8,after=2"
    whole = make("topk:ratio=0.01", rule, exchange=exchange)
    outs = [whole.step(gradients(step))["w"] for step in range(9)]
    first, second = (make("topk:ratio=0.01", rule, exchange=exchange) for _ in range(2))
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
        lane.redirect(method, method)
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
    led = gradwire.simulate(
        {"w": torch.zeros(64, 40)}, "topk:ratio=0.01", workers=1, controller="schedule:last=0.1"
    )
    with pytest.raises(ConfigError, match="was saved with no controller"):
        led.load_state_dict(plain.state_dict())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="was saved with a controller"):
        plain.load_state_dict(led.state_dict())  # type: ignore[arg-type]


BAD = {
    "schedule": "missing parameter",
    "schedule:last=0": "positive ends",
    "schedule:last=2": "ratio must be in",
    "schedule:last=0.1,stages=0": "stages must be at least 1",
    "schedule:last=0.1,stages=5,length=3": "length must be at least 5",
    "schedule:last=0.1,after=-1": "after must be at least 0",
    "schedule:last=0.1,shape=round": "shape must be one of",
    "schedule:last=0.1,setting=rank": "no setting 'rank' to control",
    "schedule:last=0.1,setting=values": "no number to control",
    "schedule:last=0.1,via=0.5/x,length=9": "via must be numbers",
    "schedule:last=0.1,via=0.5/2,length=9": "ratio must be in",
    "schedule:last=0.1,via=0.5,length=2": "length must be at least 3",
    "schedule:last=0.1,via=0.5,length=9,stages=3": "via says how many stages",
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


def test_what_is_no_number_or_would_be_rounded_is_named() -> None:
    with pytest.raises(ConfigError, match=r"schedule: last must be a number, got .0\.1."):
        Schedule(last="0.1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="schedule: first must be a number, got None"):
        Schedule(last=0.1, first=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"powersgd: rank must be whole, got 2\.6"):
        make("powersgd:rank=4", "schedule:setting=rank,last=2.6")
    with pytest.raises(ConfigError, match="schedule: last must be finite, got inf"):
        make("powersgd:rank=4", "schedule:setting=rank,last=inf")


@pytest.mark.parametrize("via", [5, [0.1], None, b"0.1"])
def test_plateaus_are_a_text(via: object) -> None:
    with pytest.raises(ConfigError, match="schedule: via must be a text of numbers"):
        Schedule(last=0.01, via=via, length=10)  # type: ignore[arg-type]


LEVELS = ["last=2", "first=2,last=8,stages=2,length=4", "first=8,via=2,last=7,length=9"]


@pytest.mark.parametrize("ramp", LEVELS)
def test_every_setting_must_go_with_the_memory(ramp: str) -> None:
    rule = f"schedule:setting=bits,{ramp}"
    refused = "schedule: qsgd:bits=2,bucket=4096 does not go with memory 'residual'"
    with pytest.raises(ConfigError, match=refused):
        make("qsgd:bits=8,bucket=4096", rule, memory="residual")
    run = make("qsgd:bits=8,bucket=4096", rule, memory="none")
    run.step(gradients(0))
    with pytest.raises(ConfigError, match=refused):
        run.switch("qsgd:bits=8,bucket=4096", memory="residual")
    run.step(gradients(1))
    assert run.stats()["memory"] == "none"


@pytest.mark.parametrize(
    "broken",
    [None, 5, b"{}", "garbage", seal([]), seal({}), seal({"spec": "schedule:last=0.1"})],
)
def test_a_broken_state_is_refused_and_leaves_no_trace(broken: object) -> None:
    run = make("topk:ratio=0.01", "schedule:last=0.1")
    run.step(gradients(0))
    before, state = run.state_dict(), run.state_dict()
    state["0"]["controller"] = broken  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"^state: (a sealed part|controller)"):
        run.load_state_dict(state)  # type: ignore[arg-type]
    assert str(run.state_dict()) == str(before)


def test_what_another_version_knew_is_refused() -> None:
    run = make("topk:ratio=0.01", "schedule:last=0.1")
    helm = run.workers[0].helm
    assert helm is not None
    for wrong in ({"pilot": {}}, {"last": [0.0]}, {"log": [[1, 2]]}):
        with pytest.raises(ConfigError, match=r"^state: controller: schedule:last=0\.1 has not"):
            helm.load({**helm.save(), **wrong})
