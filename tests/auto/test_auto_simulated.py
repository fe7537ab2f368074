"""The automatic mode in simulation: the model of a link makes its decisions repeatable."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire.auto.assembly import automatic
from gradwire.auto.auto import Auto
from gradwire.auto.calibration import Calibration
from gradwire.auto.groups import parameter_groups
from gradwire.auto.link_watch import LinkWatch
from gradwire.auto.plans import Plans
from gradwire.auto.search import SETTLED_INTERVAL, SUSPICIOUS_INTERVAL
from gradwire.auto.table import Table
from gradwire.comm.cost_model import LinkModel
from gradwire.control.timing import ModelClock, StepTiming
from gradwire.engine.engine import Engine
from gradwire.engine.make_plan import make_plan
from gradwire.simulation import Simulation

WORKERS = 4
SLOW, FAST = LinkModel(1e-4, 1e7), LinkModel(1e-6, 1e13)
SPARSE = ("topk", "efsign")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())


def gradients(net: nn.Module, step: int) -> list[dict[str, Tensor]]:
    found = []
    for rank in range(WORKERS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(16, 64, generator=generator)
        net.zero_grad()
        (net(x)[:, :64] - x).square().mean().backward()
        found.append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
    return found


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters())


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def chosen(simulation: Simulation) -> Any:
    return simulation.stats()["controller"]


def run(spec: str, link: LinkModel, optimizer: str, steps: int = 50) -> tuple[Simulation, Any]:
    net = network()
    own = {"adam": adam, "sgd": sgd}[optimizer](net)
    simulation = gradwire.simulate(net, spec, workers=WORKERS, link=link, optimizer=own)
    for step in range(steps):
        simulation.step(gradients(net, step))
    return simulation, chosen(simulation)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_slow_links_get_the_fastest_admitted_method(
    optimizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gradwire"):
        simulation, found = run("auto", SLOW, optimizer)
    rows = found["candidates"]
    assert found["phase"] == "settled"
    assert found["settled_at"] < 50
    best = min((r for r in rows if r["admitted"]), key=lambda r: r["predicted_ms"])
    mine = next(r for r in rows if r["spec"] == found["setting"])
    assert mine["predicted_ms"] <= 1.1 * best["predicted_ms"]
    assert mine["measured_ms"] < 0.2 * next(r for r in rows if r["spec"] == "none")["predicted_ms"]
    assert simulation.stats()["spec"] == found["setting"]
    assert simulation.stats()["exchange"] == mine["exchange"]
    lines = [r.getMessage() for r in caplog.records if "settled" in r.getMessage()]
    # One line for the choice, and another if its measured risk has grown since.
    assert len(lines) == 1 + sum("has become high" in line for line in lines)
    assert found["setting"] in lines[-1]
    for part in ("times as fast as", "risk", "the link: 10mbit"):
        assert part in lines[0]
    assert ("gradwire.optim" in lines[0]) == (optimizer == "adam")


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_fast_links_are_recommended_no_compression(
    optimizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gradwire"):
        _, found = run("auto", FAST, optimizer)
    assert found["setting"] == "none"
    assert "do not compress here" in caplog.text


def test_low_risk_admits_only_what_is_rated_low() -> None:
    _, low = run("auto:risk=low", SLOW, "adam")
    _, medium = run("auto", SLOW, "adam")
    for found, levels in ((low, ("none", "low")), (medium, ("none", "low", "medium"))):
        for row in found["candidates"]:
            assert row["admitted"] == (row["risk"] in levels)
        mine = next(r for r in found["candidates"] if r["spec"] == found["setting"])
        assert mine["admitted"]
    ratings = {row["spec"]: row["risk"] for row in low["candidates"]}
    assert "medium" in ratings.values()
    assert low["setting"] != medium["setting"]


def test_gradients_stay_dense_in_index_unless_the_optimiser_is_known_to_be_linear() -> None:
    net = network()
    for optimizer, admits in ((None, False), (adam(net), False), (sgd(net), True)):
        simulation = gradwire.simulate(net, "auto", workers=2, optimizer=optimizer)
        specs = [row["spec"] for row in chosen(simulation)["candidates"]]
        assert any(spec.startswith(SPARSE) for spec in specs) == admits


def test_workers_decide_the_same_in_every_step() -> None:
    net = network()
    simulation = gradwire.simulate(net, "auto", workers=WORKERS, link=SLOW, optimizer=sgd(net))
    for step in range(50):
        simulation.step(gradients(net, step))
        found = [w.observer.stats() for w in simulation.workers if w.observer is not None]
        assert all(one == found[0] for one in found[1:])


def test_resumed_runs_continue_with_the_choice() -> None:
    net = network()
    for saved_at in (4, 12, 20, 45):
        straight = gradwire.simulate(net, "auto", workers=WORKERS, link=SLOW, optimizer=adam(net))
        resumed = gradwire.simulate(net, "auto", workers=WORKERS, link=SLOW, optimizer=adam(net))
        for step in range(saved_at):
            straight.step(gradients(net, step))
        resumed.load_state_dict(straight.state_dict())
        assert chosen(resumed)["setting"] == chosen(straight)["setting"]
        if chosen(straight)["phase"] == "settled":
            for step in range(saved_at, saved_at + 3):
                own = gradients(net, step)
                ours, theirs = straight.step(own), resumed.step(own)
                assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        else:
            for step in range(saved_at, saved_at + 50):
                resumed.step(gradients(net, step))
            assert chosen(resumed)["phase"] == "settled"


def test_states_of_another_budget_are_refused() -> None:
    net = network()
    state = gradwire.simulate(net, "auto", workers=2).state_dict()
    other = gradwire.simulate(net, "auto:risk=low", workers=2)
    with pytest.raises(gradwire.ConfigError, match="auto"):
        other.load_state_dict(state)  # type: ignore[arg-type]


def on_clocks(
    net: nn.Module, link: LinkModel, compute_s: float
) -> tuple[Simulation, Sequence[ModelClock]]:
    """Returns a simulation whose link can be changed."""
    named: dict[str, Tensor] = dict(net.named_parameters())
    plan = make_plan("none", None, "auto", named.values(), WORKERS)
    workers = [Engine(plan, named, rank, WORKERS, seed=0) for rank in range(WORKERS)]
    simulation = Simulation(workers)
    clocks = [ModelClock(meter, link, compute_s) for meter in simulation.network.meters]
    for worker, clock in zip(workers, clocks, strict=True):
        worker.observer = automatic(Auto(), worker, clock, lambda: 0.0, link, True, overlaps=False)
    return simulation, clocks


def followed(changed_at: int, steps: int, compute_s: float) -> tuple[Any, Any]:
    """Returns what was chosen before a link fell to 50 Mbit/s, and so many steps later."""
    net = network()
    fast, slow = LinkModel(1e-4, 1e9), LinkModel(1e-4, 5e7)
    simulation, clocks = on_clocks(net, fast, compute_s)
    for step in range(changed_at):
        simulation.step(gradients(net, step))
    before = chosen(simulation)
    for clock in clocks:
        clock.link = slow
    for step in range(changed_at, changed_at + steps):
        simulation.step(gradients(net, step))
    return before, chosen(simulation)


def assert_good(found: Any) -> None:
    """Checks that the choice is about the best of the predictions."""
    rows = {row["spec"]: row for row in found["candidates"]}
    best_ms = min(row["predicted_ms"] for row in rows.values() if row["admitted"])
    assert rows[found["setting"]]["predicted_ms"] <= 1.1 * best_ms


@pytest.mark.parametrize("changed_at", range(50, 54))
def test_a_slower_link_is_followed_within_ten_steps(changed_at: int) -> None:
    """From 1 Gbit/s, where nothing gains 5 %, whatever step is the next to report."""
    before, after = followed(changed_at, 10, compute_s=0.06)
    assert (before["phase"], before["setting"]) == ("settled", "none")
    assert after["setting"] != "none"
    assert changed_at < after["decisions"][-1]["step"] <= changed_at + 8
    assert "the link was 1gbit" in after["decisions"][-1]["reason"]
    assert_good(after)


def test_a_link_that_changes_less_is_noticed_after_three_timings() -> None:
    """An uncompressed choice reports every fourth step, then every second: nine steps at most."""
    watch = LinkWatch(2)
    for _ in range(2):
        watch.add(StepTiming(1.0, 0.0, 0.3, 1.0, 0.3))
    for count in range(1, 4):
        watch.add(StepTiming(1.3, 0.0, 0.6, 1.0, 0.6))
        assert watch.is_suspicious
        assert watch.changed_wire_s() == (0.6 if count == 3 else None)
    steps = SETTLED_INTERVAL + 1 + 2 * SUSPICIOUS_INTERVAL
    assert steps <= 10


def test_a_fall_before_the_reference_is_noticed_by_earlier_steps() -> None:
    watch = LinkWatch(5, expected_s=(0.3, 1.0))
    for _ in range(2):
        assert watch.changed_wire_s() is None
        watch.add(StepTiming(2.0, 0.0, 1.3, 1.0, 1.3))
    assert watch.changed_wire_s() == 1.3


@pytest.mark.parametrize("changed_at", [8, 12, 17, 20])
def test_a_link_that_falls_before_a_choice_is_followed_too(changed_at: int) -> None:
    before, after = followed(changed_at, 10, compute_s=0.002)
    assert before["phase"] in ("calibrate", "time", "explore")
    changed = [d for d in after["decisions"] if "the link was 1gbit" in d["reason"]]
    assert changed
    assert changed_at < changed[0]["step"] <= changed_at + 10
    _, later = followed(changed_at, 50, compute_s=0.002)
    assert later["phase"] in ("settled", "review")
    assert_good(later)


def test_exchanges_are_those_of_the_link() -> None:
    """A gather of 16 bit messages sends more than shards, but waits less often."""
    named = {"w": torch.zeros(512, 512), "v": torch.zeros(512, 512)}
    far, near = LinkModel(0.1, 1e9), LinkModel(1e-6, 1e6)
    plan = make_plan("none", None, "auto", named, 32)
    groups = parameter_groups(named)
    table = Table(Auto(), Plans(plan, tuple(named.values()), groups, 32, False), far, True)
    int4 = [option.spec for option in table.options].index("int4")
    table.add_calibration(int4, [Calibration(0.0, 31.0, 31 * 262144.0, 0.1, 1.0)])
    assert str(table.options[int4].plan.exchange) == "gather"
    before = table.rows[int4].load
    assert before is not None
    table.move_to(near, 0)
    after = table.rows[int4].load
    assert str(table.options[int4].plan.exchange) == "sharded"
    assert after is not None
    assert after.link_bytes < 0.2 * before.link_bytes
    state = table.state_dict()
    other = Table(Auto(), table.plans, far, True)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert other.options == table.options
