"""Attacks: what is sent differs from the honest gradient by its formula, and what it does."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.attacks import ATTACKS, AttackContext, Replay, attack_of
from gradwire.base.aggregation import ROBUST
from gradwire.errors import ConfigError
from lockstep import noise

WORKERS, LIARS, SHAPE = 10, 3, (40, 30)
CTX = AttackContext(step=0, rank=9, seed=1)
OWN, HONEST = 1 + noise(6, seed=1), 1 + noise(5, 6)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("sign_flip", -OWN),
        ("sign_flip:scale=100", -100 * OWN),
        ("alie:z=1.5", HONEST.mean(0) - 1.5 * HONEST.std(0, correction=0)),
        ("alie:z=-1", HONEST.mean(0) + HONEST.std(0, correction=0)),
        ("inner_product:eps=0.1", -0.1 * HONEST.mean(0)),
        ("nan", torch.full((6,), float("nan"))),
        ("replay:delay=2", torch.zeros(6)),
    ],
)
def test_what_is_sent_by_its_formula(spec: str, expected: Tensor) -> None:
    attack = attack_of(spec)
    own = OWN.clone()
    sent = attack.forge(own, HONEST, attack.state(own), CTX)
    torch.testing.assert_close(sent, expected, equal_nan=True)
    assert torch.equal(own, OWN)
    assert not torch.equal(sent, OWN)


def test_noise_has_its_scale_and_differs_between_steps_and_ranks() -> None:
    attack, own = attack_of("noise:scale=3"), torch.ones(10_000)
    sent = [
        attack.forge(own, own[None], {}, AttackContext(step, rank, seed))
        for step, rank, seed in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    assert float(sent[0].std()) == pytest.approx(3, rel=0.05)
    assert abs(float(sent[0].mean())) < 0.1
    assert all(not torch.equal(one, sent[0]) for one in sent[1:])
    assert torch.equal(attack.forge(own, own[None], {}, AttackContext(0, 0, 0)), sent[0])


def test_replay_sends_the_gradient_of_some_steps_ago() -> None:
    attack = Replay(delay=2)
    state = attack.state(OWN)
    sent = [
        attack.forge(torch.full((6,), float(step)), HONEST, state, AttackContext(step, 9, 1))
        for step in range(1, 6)
    ]
    assert [float(one[0]) for one in sent] == [0, 0, 1, 2, 3]


def simulation(exchange: str, attack: str | None, spec: str = "none") -> gradwire.Simulation:
    attacks = dict.fromkeys(range(WORKERS - LIARS, WORKERS), attack) if attack else {}
    return gradwire.simulate(
        {"w": torch.zeros(SHAPE)},
        spec,
        workers=WORKERS,
        exchange=exchange,
        attacks={rank: name for rank, name in attacks.items() if name},
    )


def gradients(x: Tensor, step: int) -> list[dict[str, Tensor]]:
    """Returns gradients of a quadratic, with noise that differs between workers."""
    optimum = noise(*SHAPE, seed=1)
    seeds = range(1000 + WORKERS * step, 1000 + WORKERS * (step + 1))
    return [{"w": x - optimum + 0.3 * noise(*SHAPE, seed=seed)} for seed in seeds]


def test_attackers_know_the_honest_gradients_and_leave_the_callers_alone() -> None:
    given = gradients(torch.zeros(SHAPE), 0)
    kept = [one["w"].clone() for one in given]
    mean = simulation("gather", "inner_product:eps=2").step(given)["w"]
    honest = torch.stack(kept[: WORKERS - LIARS]).mean(0)
    torch.testing.assert_close(mean, honest * (0.7 - 0.3 * 2))
    assert all(torch.equal(one["w"], copy) for one, copy in zip(given, kept, strict=True))


def test_a_run_resumes_bitwise() -> None:
    one = simulation("gather:aggregate=clipped,faulty=3", "replay:delay=3")
    for step in range(5):
        one.step(gradients(torch.zeros(SHAPE), step))
    two = simulation("gather:aggregate=clipped,faulty=3", "replay:delay=3")
    two.load_state_dict(one.state_dict())  # type: ignore[arg-type]
    for step in range(5, 8):
        given = gradients(torch.zeros(SHAPE), step)
        assert torch.equal(one.step(given)["w"], two.step(given)["w"])


def floor(exchange: str, attack: str | None, spec: str = "none") -> float:
    """Returns the relative distance from the optimum after 40 steps, the last 10 on average."""
    sim, x, optimum = simulation(exchange, attack, spec), torch.zeros(SHAPE), noise(*SHAPE, seed=1)
    found = []
    for step in range(40):
        x = x - 0.2 * sim.step(gradients(x, step))["w"]
        found.append(float((x - optimum).norm() / optimum.norm()))
    return sum(found[-10:]) / 10


STRONG = ("sign_flip:scale=10", "noise:scale=10", "inner_product:eps=10", "alie:z=4")


@pytest.mark.parametrize("attack", STRONG)
def test_robust_aggregations_reach_a_lower_floor_than_the_mean(attack: str) -> None:
    """With 10 workers, 3 of them faulty, on a convex quadratic; 0.03 is that of honest ones."""
    mean = floor("gather", attack)
    assert floor("gather", None) < 0.06
    for name in ROBUST:
        robust = floor(f"gather:aggregate={name},faulty=3", attack)
        assert robust < 0.6 * mean, name


@pytest.mark.parametrize("name", ["diameter", "multi_krum", "clipped"])
def test_compressed_gradients_are_no_less_robust(name: str) -> None:
    assert floor(f"gather:aggregate={name},faulty=3", "sign_flip:scale=10", "qsgd:bits=8") < 0.1


def test_nan_stops_the_mean_and_no_robust_aggregation() -> None:
    mean = simulation("gather", "nan")
    assert not mean.step(gradients(torch.zeros(SHAPE), 0))["w"].isfinite().all()
    for name in ROBUST:
        assert floor(f"gather:aggregate={name},faulty=3", "nan") < 0.2, name


def test_a_small_inner_product_is_no_outlier() -> None:
    """Minus a tenth of the mean is nearer to honest gradients than these are to each other.

    So the subset of smallest diameter has all three liars in it, and loses more than the mean does.
    """
    given = [{"w": 1 + 3 * noise(*SHAPE, seed=seed)} for seed in range(WORKERS)]
    sent = simulation("gather:aggregate=diameter,faulty=3", "inner_product:eps=0.1").step(given)
    mean = simulation("gather", "inner_product:eps=0.1").step(given)
    assert float(sent["w"].mean()) == pytest.approx((4 - 0.3) / 7, abs=0.1)
    assert float(mean["w"].mean()) == pytest.approx((7 - 0.3) / 10, abs=0.1)


@pytest.mark.parametrize(
    ("attack", "error"),
    [
        ("alei", "no attack named 'alei'; there are alie, inner_product"),
        ("alie:y=1", r"alie: unknown parameter \['y'\], expected \['z'\]"),
        ("alie:z=nan", "alie: z must be finite, got nan"),
        ("noise:scale=0", "noise: scale must be above 0, got 0"),
        ("inner_product:eps=-1", "inner_product: eps must be above 0, got -1"),
        ("replay:delay=0", "replay: delay must be at least 1, got 0"),
    ],
)
def test_bad_attacks_are_refused_by_name(attack: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        simulation("gather", attack)


@pytest.mark.parametrize(
    ("attacks", "error"),
    [
        ({4: "nan"}, "attacks: rank must be 0 to 3, got 4"),
        (dict.fromkeys(range(4), "nan"), "attacks: one of 4 workers must be honest"),
        ({0: 7}, "attack: expected a spec or an attack, got 7"),
    ],
)
def test_bad_attackers_are_refused_by_name(attacks: dict[int, str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        gradwire.simulate({"w": torch.zeros(SHAPE)}, "none", workers=4, attacks=attacks)


def test_all_attacks_have_a_spec() -> None:
    assert all(type(attack_of(name)) is cls for name, cls in ATTACKS.items())
