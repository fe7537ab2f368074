"""Errors of settings, from samples, and the progress of a step."""

import pytest

from gradwire.control._autopilot.error_model import RelativeErrors, relative_progress


def test_errors_of_settings_are_scaled_together() -> None:
    errors = RelativeErrors()
    errors.add_sample(3, 1.0, 2.0, "selection")
    # A quarter of the entries keeps at least a quarter; four times as many may keep twice.
    assert errors.predict(4, [9, 9, 0.4, 0.1, 0.025], "selection") == pytest.approx(0.875)
    assert errors.predict(2, [9, 9, 0.4, 0.1, 0.025], "selection") == pytest.approx(0.0)
    errors.add_sample(4, 1.2, 2.0, "selection")
    assert errors.errors == pytest.approx({3: 1 - 0.5 / 0.99, 4: 0.6})
    errors = RelativeErrors({3: 0.5, 4: 1 - 0.4 * 0.99}, last_sampled=3)
    errors.add_sample(3, 7.0, 10.0, "selection")
    # The kept energy fell from 0.5 to 0.4 at the sampled setting, so from 0.4 to 0.32 there.
    assert errors.errors == pytest.approx({3: 0.6, 4: 0.68})
    errors.add_sample(4, 9.0, 10.0, "selection")
    # Not the setting of the last sample: the new value replaces the old, and others stay.
    assert errors.errors == pytest.approx({3: 1 - 0.4 / 0.99, 4: 0.9})
    errors.add_sample(0, 0.0, 20.0, "selection")
    assert errors.errors == pytest.approx({3: 1 - 0.4 / 0.99**2, 4: 1 - 0.1 / 0.99})
    assert errors.energy == 15
    rounding = RelativeErrors({2: 0.01})
    assert rounding.predict(3, [9, 9, 4, 3], "noise") == pytest.approx(0.04)


def test_progress_of_a_step() -> None:
    assert relative_progress(0.0, "selection", 10) == relative_progress(0.0, "noise", 10) == 1
    # Half of the norm: 50 steps behind, once.
    assert relative_progress(0.75, "selection", 50) == 0.5
    assert relative_progress(0.75, "selection", 450) == pytest.approx(0.9)
    assert relative_progress(2.0, "rounding", 50) < 0.01
    assert relative_progress(1.0, "noise", 50) == relative_progress(1.0, "noise", 450) == 0.5
