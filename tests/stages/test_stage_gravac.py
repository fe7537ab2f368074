"""GraVAC between stages: the gate on the gain, and the choice by predicted time."""

import pytest

from gradwire.errors import ConfigError
from gradwire.spec import format_spec
from gradwire.stages.gravac import LinkSpeed, Search, StageGraVAC, controller_of
from gradwire.stages.method import stage_method

BYTES = [1000, 250, 125]


def search(gains: list[float], byte_s: float, step_s: float = 1.0) -> Search:
    found = Search(StageGraVAC(epsilon=0.9), len(gains))
    for setting, gain in enumerate(gains):
        found.add_gain(setting, gain)
    found.add_step(step_s)
    found.link = LinkSpeed(0.0, byte_s)
    return found


def test_a_fast_link_needs_no_compression() -> None:
    assert search([1.0, 0.9999, 0.99], 0.0).choose(0, BYTES) == 0
    # A millionth of a second for a byte saves 0.09 % of the step, below omega.
    assert search([1.0, 0.9999, 0.99], 1e-6).choose(0, BYTES) == 0


def test_a_slow_link_gets_the_most_gain_per_second() -> None:
    # From 1 s to 0.325 s at int8, and to 0.2125 s at int4.
    assert search([1.0, 0.9999, 0.99], 9e-4).choose(0, BYTES) == 2
    # The gate: int4 keeps too little.
    assert search([1.0, 0.9999, 0.89], 9e-4).choose(0, BYTES) == 1
    assert search([1.0, 0.8, 0.7], 9e-4).choose(2, BYTES) == 0


def test_a_change_must_be_worth_it() -> None:
    # int8 to int4 saves 125 bytes: 0.9 % of the step.
    assert search([1.0, 0.9999, 0.9999], 7.2e-5).choose(1, BYTES) == 1
    assert search([1.0, 0.9999, 0.9999], 7.2e-4).choose(1, BYTES) == 2


def test_gains_are_smoothed_and_restored() -> None:
    found = search([1.0, 0.9, 0.9], 1e-4)
    found.add_gain(1, 0.5)
    assert found.gains[1] == pytest.approx(0.7)
    other = Search(StageGraVAC(), 3)
    other.load(found.state())
    assert other.state() == found.state()
    assert other.choose(0, BYTES) == found.choose(0, BYTES)


def test_nothing_changes_before_the_link_was_measured() -> None:
    found = search([1.0, 0.99, 0.99], 1e-3)
    found.link = None
    assert found.choose(1, BYTES) == 1


def test_the_ladder_ends_at_the_given_method() -> None:
    def ladder(spec: str) -> list[str]:
        settings = StageGraVAC().settings("gradients", stage_method("gradients", spec))
        return [format_spec(method) for method in settings]

    assert ladder("int4") == ["none", "int8", "int4"]
    assert ladder("int8") == ["none", "int8"]
    assert ladder("qsgd:bits=2") == ["none", "int8", "int4", "qsgd:bits=2"]


def test_wrong_settings_are_named() -> None:
    assert controller_of("gravac") == StageGraVAC()
    with pytest.raises(ConfigError, match=r"controller must be 'gravac'.*got 'autopilot'"):
        controller_of("autopilot")
    for wrong in ({"epsilon": 0.0}, {"omega": 2.0}, {"window": 1}, {"ladder": ""}, {"alpha": 0}):
        with pytest.raises(ConfigError, match=f"gravac: {next(iter(wrong))} must be"):
            StageGraVAC(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="powersgd"):
        StageGraVAC("none/powersgd:rank=1").settings("gradients", stage_method("gradients", "int4"))
