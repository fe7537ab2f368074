"""Error feedback of random-k lowers the largest learning rate by about its ratio."""

import torch

import gradwire

ENTRIES, RATIO, STEPS = 10_000, 0.01, 1000


def error(rate: float, memory: str) -> float:
    """Returns the error that is left of 1 on a quadratic of curvature 1, without noise."""
    x = {"x": torch.ones(100, ENTRIES // 100)}
    sim = gradwire.simulate(x, f"randomk:ratio={RATIO}", workers=2, memory=memory)
    for _ in range(STEPS):
        x = {"x": x["x"] - rate * sim.step([x, x])["x"]}
    return float(x["x"].square().mean().sqrt())


def test_each_setting_wins_at_the_learning_rates_that_theory_says() -> None:
    """With a residual a step multiplies the error by 1 - rate x wait, without one by 1 - rate."""
    fast, slow = 0.2, 0.2 * RATIO
    assert error(fast, "none") < 0.2
    assert error(fast, "residual") > 1
    assert error(slow, "none") > 0.95
    assert error(slow, "residual") < 0.2
