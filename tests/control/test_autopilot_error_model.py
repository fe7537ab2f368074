"""What settings lose, from samples, and what a step is then worth."""

import pytest

from gradwire.control._autopilot.error_model import Losses, progress


def test_losses_of_settings_go_together() -> None:
    losses = Losses()
    losses.sample(3, 1.0, 2.0, "choice")
    # A quarter of the entries keeps a quarter at least; four times as many keep perhaps twice.
    assert losses.at(4, [9, 9, 0.4, 0.1, 0.025], "choice") == pytest.approx(0.875)
    assert losses.at(2, [9, 9, 0.4, 0.1, 0.025], "choice") == pytest.approx(0.0)
    losses.sample(4, 1.2, 2.0, "choice")
    assert losses.error == pytest.approx({3: 1 - 0.5 / 0.99, 4: 0.6})
    losses = Losses({3: 0.5, 4: 1 - 0.4 * 0.99}, latest=3)
    losses.sample(3, 7.0, 10.0, "choice")
    # Kept fell from 0.5 to 0.4 where it was sampled, so from 0.4 to 0.32 there.
    assert losses.error == pytest.approx({3: 0.6, 4: 0.68})
    losses.sample(4, 9.0, 10.0, "choice")
    # It has not been looked at for a while: the new counts alone, and says nothing of others.
    assert losses.error == pytest.approx({3: 1 - 0.4 / 0.99, 4: 0.9})
    losses.sample(0, 0.0, 20.0, "choice")
    assert losses.error == pytest.approx({3: 1 - 0.4 / 0.99**2, 4: 1 - 0.1 / 0.99})
    assert losses.energy == 15
    rounding = Losses({2: 0.01})
    assert rounding.at(3, [9, 9, 4, 3], "noise") == pytest.approx(0.04)


def test_what_a_step_is_worth() -> None:
    assert progress(0.0, "choice", 10) == progress(0.0, "noise", 10) == 1
    # Half of the norm: 50 steps behind, whenever that is.
    assert progress(0.75, "choice", 50) == 0.5
    assert progress(0.75, "choice", 450) == pytest.approx(0.9)
    assert progress(2.0, "rounding", 50) < 0.01
    assert progress(1.0, "noise", 50) == progress(1.0, "noise", 450) == 0.5
