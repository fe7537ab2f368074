"""The adviser: its choice among constructed options, rated risks, and a whole job of real ranks."""

import os
from copy import deepcopy
from dataclasses import replace
from typing import Any

import advise_jobs as jobs
import pytest
import small_model
import torch

import gradwire
from gradwire.auto.accuracy_risk import Level, Risk, assess_risk
from gradwire.auto.optimizers import find_optimizer, is_adaptive
from gradwire.comm.cost_model import LinkModel, Network
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.perfmodel.advise import Advice, Option, predict_options, rank_options
from gradwire.perfmodel.compression_error import measure_error
from gradwire.perfmodel.compute import Compute
from gradwire.perfmodel.overlap import StepTimes
from gradwire.perfmodel.predict import Prediction
from gradwire.perfmodel.probe import load_warning
from processes import Ranks

TENSORS = {name: p.detach() for name, p in small_model.model().named_parameters()}


@pytest.fixture(scope="module")
def compute() -> Compute:
    return small_model.measured(small_model.model())


def option(spec: str, step_ms: float, level: Level = "none", sent: float = 1e6) -> Option:
    times = StepTimes(step_ms / 1e3, 0.0, 0.0, 0.0, 0.0)
    return Option(spec, "mean", Prediction(times, sent, 1), Risk(level, 0.5, "why"))


def measured_as(advice: Advice, samples_s: dict[str, tuple[float, ...]]) -> Advice:
    """Returns an advice with samples of its options; those of others do not vary."""
    options = [
        replace(
            o, prediction=replace(o.prediction, samples_s=samples_s.get(o.spec, (o.step_s,) * 10))
        )
        for o in advice.options
    ]
    return rank_options("here", options)


def advised(*methods: Option, fp32: float = 100, fp16: float = 60) -> Advice:
    return rank_options("here", [option("none", fp32), option("fp16", fp16), *methods])


def test_the_fastest_is_chosen() -> None:
    found = advised(option("efsign", 30), option("topk:ratio=0.01", 20, "medium"))
    assert found.choice.spec == "topk:ratio=0.01"
    assert found.compresses
    assert "Use topk:ratio=0.01: 3.00 times as fast as DDP in 16 bits, 5.00" in str(found)


def test_of_equals_the_one_with_less_risk_is_chosen() -> None:
    found = advised(option("efsign", 20.5, "low"), option("topk:ratio=0.01", 20, "medium"))
    assert found.choice.spec == "efsign"


def test_what_the_measurements_do_not_tell_apart_is_a_tie() -> None:
    """Two runs that find another one of two methods faster give the same advice."""
    overtaking = (0.018, 0.023) * 5
    samples_s = {"powersgd:rank=1": overtaking, "powersgd:rank=4": overtaking[::-1]}
    for one, other in ((20.0, 21.5), (21.5, 20.0)):
        found = advised(
            option("powersgd:rank=1", one, "low", sent=1e5),
            option("powersgd:rank=4", other, "low", sent=4e5),
        )
        advice = measured_as(found, samples_s)
        assert advice.choice.spec == "powersgd:rank=1"
        assert "A tie, decided by risk and bytes: powersgd:rank=4 may be as fast" in str(advice)


def test_a_gain_that_is_not_sure_is_no_reason_to_compress() -> None:
    found = advised(option("efsign", 55), fp32=100, fp16=60)
    assert found.compresses
    unsure = measured_as(found, {"efsign": (0.05, 0.07) * 5})
    assert unsure.choice.spec == "fp16"
    assert "beyond doubt" in str(unsure)
    assert "A tie: efsign is 1.09 times (0.86 to 1.20) as fast" in str(unsure)


def test_a_busy_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 9.0, 9.0))
    assert load_warning() is None
    monkeypatch.setattr(os, "getloadavg", lambda: (1e4, 0.0, 0.0))
    text = load_warning()
    assert text is not None
    assert text in str(rank_options("here", [option("none", 1), option("fp16", 1)], text))


def test_a_high_risk_is_never_recommended_but_its_gain_is_reported() -> None:
    found = advised(option("randomk:ratio=0.01", 20, "high"), option("powersgd:rank=1", 30, "low"))
    assert found.choice.spec == "powersgd:rank=1"
    assert str(found).endswith(
        "Use powersgd:rank=1: 2.00 times as fast as DDP in 16 bits, 3.33 times as fast as in fp32. "
        "Risk to accuracy: low (why). randomk:ratio=0.01 would be 1.50 times as fast as that, but "
        "its risk to accuracy is high (why): only a training run can show whether it is acceptable."
    )


def test_methods_with_a_high_risk_stand_below_all_others_under_a_heading() -> None:
    found = advised(
        option("signsgd", 20, "high"),
        option("efsign", 30, "medium"),
        option("randomk:ratio=0.01", 10, "high"),
    )
    order = ["efsign", "fp16", "none", "randomk:ratio=0.01", "signsgd"]
    assert [ranked.spec for ranked in found.options] == order
    lines = str(found).splitlines()
    heading = lines.index("Not advised, since the risk to accuracy is high:")
    first_words = [line.split()[0] for line in lines if line]
    assert first_words[2:] == [*order[:3], "Not", *order[3:], "Use"]
    assert lines[heading + 1].startswith("randomk:ratio=0.01 ")


def test_without_a_high_risk_there_is_no_such_heading() -> None:
    assert "Not advised" not in str(advised(option("efsign", 30, "medium")))


def test_a_high_risk_with_a_small_gain_is_not_mentioned() -> None:
    found = advised(option("signsgd", 29, "high"), option("efsign", 30, "low"))
    assert str(found).endswith("Risk to accuracy: low (why).")


def test_where_only_a_high_risk_is_faster_the_advice_is_not_to_compress() -> None:
    found = advised(option("randomk:ratio=0.01", 20, "high"), option("efsign", 70, "low"))
    assert found.choice.spec == "fp16"
    assert not found.compresses
    assert found.recommendation().startswith(
        "Do not compress here: no method without a high risk to accuracy gains more than 5% over "
        "DDP in 16 bits. Use DDP in 16 bits. randomk:ratio=0.01 would be 3.00 times as fast"
    )


@pytest.mark.parametrize("step_ms", [58, 60, 80])
def test_no_compression_where_it_gains_less_than_5_percent(step_ms: float) -> None:
    found = advised(option("efsign", step_ms))
    assert found.choice.spec == "fp16"
    assert "Do not compress here" in str(found)
    assert str(found).endswith("Use DDP in 16 bits.")


def test_16_bits_must_pay_too() -> None:
    text = str(advised(option("efsign", 99), fp32=100, fp16=120))
    assert text.endswith("no method gains more than 5% over DDP in fp32. Use DDP as it is.")


def test_compression_is_recommended_on_a_slow_network_only(compute: Compute) -> None:
    """The small model computes for milliseconds; its bytes take no time at all, or seconds."""
    plans = {
        spec: make_plan(spec, None, "auto", TENSORS.values(), 4)
        for spec in ("none", "fp16", "powersgd:rank=1", "efsign")
    }
    compresses = []
    for rate_bits in (1e13, 1e6):
        network = Network(LinkModel(0.0, rate_bits))
        options = predict_options(plans, compute, TENSORS, 4, network, float("inf"), False)
        compresses.append(rank_options("here", options).compresses)
    assert compresses == [False, True]


@pytest.mark.parametrize(
    ("spec", "memory", "error", "level"),
    [
        ("none", None, 0.0, "none"),
        ("fp16", None, 0.001, "none"),
        ("signsgd", None, 5.0, "high"),
        ("topk:ratio=0.01", "residual", 0.8, "low"),
        ("topk:ratio=0.01", "residual", 0.95, "medium"),
        ("topk:ratio=0.01", "residual", 0.99, "high"),
        ("topk:ratio=0.01", "none", 0.8, "high"),
        ("qsgd:bits=4", None, 0.4, "low"),
        ("qsgd:bits=4", None, 1.5, "medium"),
        ("qsgd:bits=4", None, 9.0, "high"),
    ],
)
def test_risk_is_rated_by_kind_and_error(
    spec: str, memory: str | None, error: float, level: str
) -> None:
    plan = make_plan(spec, memory, "auto", TENSORS.values(), 4)
    assert assess_risk(plan, error, size=4, adaptive=False).level == level


@pytest.mark.parametrize(
    ("spec", "error", "level"),
    [
        ("none", 0.0, "none"),
        ("int4", 0.1, "low"),
        ("powersgd:rank=4", 0.8, "medium"),
        ("topk:ratio=0.01", 0.8, "high"),
        ("efsign", 0.6, "high"),
        ("qsgd:bits=4", 0.4, "low"),
    ],
)
def test_adaptive_optimizers_raise_the_risk_of_late_entries(
    spec: str, error: float, level: str
) -> None:
    plan = make_plan(spec, None, "auto", TENSORS.values(), 4)
    assert assess_risk(plan, error, size=4, adaptive=True).level == level


@pytest.mark.parametrize(
    ("name", "adaptive"),
    [("sgd", False), ("adam", True), ("AdamW", True), ("rmsprop", True), ("adagrad", True)],
)
def test_optimizers_are_found_by_name_and_tested(name: str, adaptive: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer: Any = find_optimizer(name)
    built = optimizer([parameter], lr=0.0)
    parameter.grad = torch.ones(3)
    built.step()
    state = deepcopy(built.state_dict())
    assert is_adaptive(built) == adaptive
    assert str(built.state_dict()) == str(state)
    assert (
        is_adaptive(torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.1)) is False
    )


def test_unknown_optimizers_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"no optimizer named 'adamv' in torch\.optim; did you mean"
    ):
        find_optimizer("adamv")


def test_errors_are_measured_on_the_gradients(compute: Compute) -> None:
    def error(spec: str) -> float:
        return measure_error(
            make_plan(spec, None, "auto", TENSORS.values(), 2), TENSORS, compute.steps
        )

    assert error("none") == pytest.approx(0, abs=1e-6)
    assert 0 < error("fp16") < 0.01
    assert error("topk:ratio=0.5") < error("topk:ratio=0.05") < 1
    assert error("powersgd:rank=4") < error("powersgd:rank=1") < 1


def test_ranks_of_a_running_job_agree_on_the_advice(four_ranks: Ranks) -> None:
    answers = four_ranks.run(jobs.advised, ["efsign"])
    texts = [text for text, _ in answers]
    assert len(set(texts)) == 1
    assert "4 workers, links as probed" in texts[0]
    for spec in ("none", "fp16", "efsign"):
        assert spec in texts[0]
    # Neither the parameters nor the gradients of the job have changed.
    assert all(untouched for _, untouched in answers)


def test_wrong_arguments_are_refused_before_measuring(four_ranks: Ranks) -> None:
    assert four_ranks.run(jobs.refusals)[0] == {
        "loss": "advise: loss must be a function of the model, got 3",
        "optimizer": "advise: optimizer must be a torch.optim.Optimizer or a function of the model "
        "that makes one, got 'sgd'",
        "group": "process_group: expected a ProcessGroup, got 'world'",
        "one spec": "no compressor named 'nope'; did you mean 'none'?",
        "specs": "advise: specs must be spec strings, got 3",
        "a spec": "advise: specs must be spec strings, got ['efsign', 3]",
    }


def test_only_a_ddp_model_is_accepted() -> None:
    with pytest.raises(ConfigError, match="expected a DistributedDataParallel, got Linear"):
        gradwire.advise(torch.nn.Linear(2, 2), lambda model: torch.zeros(()), torch.optim.SGD)  # type: ignore[arg-type]
