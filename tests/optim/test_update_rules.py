"""Update rules in simulation: the optimisers' formulas, and error feedback around the updates."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.base import UpdateRule
from gradwire.errors import ConfigError
from gradwire.optim import AdamUpdate, LionUpdate, MuonUpdate, SGDUpdate
from gradwire.optim.muon import orthonormalised
from gradwire.simulation import Simulation

SHAPES = {"weight": (96, 40), "bias": (40,)}


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(step: int, worker: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    return {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}


def workers_of(rule: UpdateRule, spec: str, workers: int, **options: object) -> Simulation:
    return gradwire.simulate(start(), spec, workers=workers, update=rule, **options)  # type: ignore[arg-type]


def moments(simulation: Simulation) -> dict[str, Tensor]:
    """Returns every tensor of the memories of all workers, copied."""
    return {
        f"{i} {name} {key}": tensor.clone()
        for i, worker in enumerate(simulation.workers)
        for name, lane in worker.lanes.items()
        for key, tensor in lane.memory_state.items()
    }


def applied(rule: UpdateRule, steps: int, lr: float, decay: float) -> dict[str, Tensor]:
    """Returns the parameters after some steps of one worker without compression."""
    parameters, simulation = start(), workers_of(rule, "none", 1)
    for step in range(steps):
        for name, update in simulation.step([gradients(step)]).items():
            parameters[name] -= lr * (update + decay * parameters[name])
    return parameters


Build = Callable[[list[Tensor]], torch.optim.Optimizer]

TORCH: dict[str, tuple[UpdateRule, float, Build]] = {
    "adamw": (AdamUpdate(), 0.1, lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    "adam": (
        AdamUpdate(0.8, 0.95, 1e-3),
        0.0,
        lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.95), eps=1e-3),
    ),
    "sgd": (
        SGDUpdate(0.9, nesterov=True),
        0.0,
        lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_one_worker_without_compression_is_torchs_optimiser(name: str) -> None:
    rule, decay, build = TORCH[name]
    expected = {n: torch.nn.Parameter(p) for n, p in start().items()}
    optimiser = build([*expected.values()])
    for step in range(30):
        for key, gradient in gradients(step).items():
            expected[key].grad = gradient
        optimiser.step()
    torch.testing.assert_close(
        applied(rule, 30, 0.01, decay), {n: p.detach() for n, p in expected.items()}
    )


def test_lion_is_the_algorithm_of_its_paper() -> None:
    expected = {n: p.double() for n, p in start().items()}
    mean = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in SHAPES.items()}
    for step in range(20):
        for name, gradient in gradients(step).items():
            direction = (0.9 * mean[name] + 0.1 * gradient).sign()
            expected[name] -= 0.01 * (direction + 0.1 * expected[name])
            mean[name] = 0.99 * mean[name] + 0.01 * gradient
    ours = applied(LionUpdate(0.9, 0.99), 20, 0.01, 0.1)
    torch.testing.assert_close(
        {n: p.double() for n, p in ours.items()}, expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_is_torchs_but_for_its_bfloat16(nesterov: bool, adjust: str) -> None:
    """torch's iterations run in bfloat16, ours on a CPU in float32: a difference of some percent
    of a step, which a wrong factor, momentum or coefficient would exceed by far."""
    rule = MuonUpdate(0.95, nesterov, 5, adjust)  # type: ignore[arg-type]
    expected = torch.nn.Parameter(start()["weight"])
    optimiser = torch.optim.Muon(
        [expected], 0.01, 0.0, 0.95, nesterov, adjust_lr_fn=adjust  # type: ignore[arg-type]
    )  # fmt: skip
    ours = start()["weight"]
    simulation = gradwire.simulate({"weight": ours}, "none", workers=1, update=rule)
    for step in range(5):
        gradient, before = gradients(step)["weight"], expected.detach().clone()
        expected.grad = gradient.clone()
        optimiser.step()
        update = simulation.step([{"weight": gradient}])["weight"]
        change = (before - expected.detach()) / 0.01
        assert float((update - change).norm() / change.norm()) < 0.03


def test_newton_schulz_brings_singular_values_close_to_one() -> None:
    for shape in ((48, 40), (30, 70)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(orthonormalised(matrix, 5))
        assert 0.5 < float(values.min()) <= float(values.max()) < 1.3


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "int4", "powersgd:rank=2", "efsign"])
@pytest.mark.parametrize("rule", [AdamUpdate(), LionUpdate(), MuonUpdate()], ids=lambda r: r.name)
def test_sent_and_unsent_updates_add_up(rule: UpdateRule, spec: str) -> None:
    """Every worker's updates are computed by itself alone, from one worker without compression."""
    plan = {"weight": rule, "bias": AdamUpdate()}
    tensors, workers = start(), 3
    simulation = gradwire.simulate(
        tensors, spec, workers=workers, update=plan, memory="residual", exchange="gather"
        if spec != "powersgd:rank=2" else "auto",
    )  # fmt: skip
    alone = [gradwire.simulate(tensors, "none", workers=1, update=plan) for _ in range(workers)]
    sent = given = torch.zeros(SHAPES["weight"])
    for step in range(8):
        own = [gradients(step, worker) for worker in range(workers)]
        sent = sent + simulation.step(own)["weight"]
        updates = [w.step([g])["weight"].clone() for w, g in zip(alone, own, strict=True)]
        given = given + torch.stack(updates).mean(0)
    unsent = [w.lanes["weight"].memory_state["residual"] for w in simulation.workers]
    left = torch.stack(unsent).mean(0).view(SHAPES["weight"])
    torch.testing.assert_close(sent + left, given, rtol=1e-4, atol=1e-4)
    # A Lion update is a sign, which int4 and efsign send exactly.
    assert float(left.norm()) > 0.01 * float(given.norm()) or rule.name == "lion"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1", "powersgd:rank=2"])
def test_a_step_with_a_nonfinite_gradient_changes_no_moment(spec: str, value: float) -> None:
    simulation, twin = (workers_of(AdamUpdate(), spec, 2) for _ in range(2))
    for step in range(3):
        own = [gradients(step, worker) for worker in range(2)]
        simulation.step(own)
        twin.step([gradients(step, worker) for worker in range(2)])
    before = moments(simulation)
    bad = [gradients(3, worker) for worker in range(2)]
    bad[1]["bias"][5] = value
    simulation.step(bad)
    twin_next = twin.step([gradients(4, worker) for worker in range(2)])
    after = moments(simulation)
    assert all(torch.equal(before[key], after[key]) for key in before)
    ours_next = simulation.step([gradients(4, worker) for worker in range(2)])
    assert all(torch.equal(ours_next[n], twin_next[n]) for n in SHAPES)


def test_chunks_of_whole_blocks_have_the_updates_of_the_whole() -> None:
    """A method whose blocks are not cut sends the same entries, whatever the chunks are."""
    spec, rule = "chunktopk:k=4,chunk=40,values=fp32", AdamUpdate()
    whole, cut = workers_of(rule, spec, 2), workers_of(rule, spec, 2, chunk_bytes=6000)
    assert len(cut.workers[0].lanes) > len(whole.workers[0].lanes)
    for step in range(4):
        means = [
            s.step([gradients(step, worker) for worker in range(2)])["weight"] for s in (whole, cut)
        ]
        assert torch.equal(*means)


def test_a_matrix_of_muon_and_a_clipped_tensor_are_not_cut() -> None:
    for rule in (MuonUpdate(), AdamUpdate(clip=1.0)):
        plan = {"weight": rule, "bias": AdamUpdate()}
        simulation = gradwire.simulate(
            start(), "topk:ratio=0.1", workers=1, update=plan, chunk_bytes=6000
        )
        assert [*simulation.workers[0].lanes] == ["weight", "bias"]


@pytest.mark.parametrize("chunk_bytes", [0, 6000])
@pytest.mark.parametrize("after", ["int4", "topk:ratio=0.2", "none"])
def test_switching_the_method_keeps_the_moments(after: str, chunk_bytes: int) -> None:
    simulation = workers_of(AdamUpdate(), "topk:ratio=0.1", 2, chunk_bytes=chunk_bytes)
    twin = workers_of(AdamUpdate(), "none", 2)
    for step in range(3):
        simulation.step([gradients(step, worker) for worker in range(2)])
        twin.step([gradients(step, worker) for worker in range(2)])
    simulation.switch(after)
    simulation.step([gradients(3, worker) for worker in range(2)])
    twin.step([gradients(3, worker) for worker in range(2)])
    for ours, theirs in zip(simulation.workers, twin.workers, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            found = [lane.memory_state[key] for lane in ours.lanes_of("weight")]
            torch.testing.assert_close(torch.cat(found), theirs.lanes["weight"].memory_state[key],
                                       rtol=0, atol=0)  # fmt: skip
        assert all(float(lane.memory_state["step"]) == 4 for lane in ours.lanes.values())


def test_a_clipped_gradient_has_the_norm_of_the_limit() -> None:
    simulation = gradwire.simulate(
        {"w": torch.zeros(4)}, "none", workers=1, update=SGDUpdate(0.0, clip=1.0)
    )
    assert simulation.step([{"w": torch.full((4,), 1.5)}])["w"].tolist() == [0.5] * 4
    assert simulation.step([{"w": torch.full((4,), 0.25)}])["w"].tolist() == [0.25] * 4


def test_bad_rules_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="adam: betas must be two numbers"):
        AdamUpdate(beta2=1.0)
    with pytest.raises(ConfigError, match="muon: adjust must be one of"):
        MuonUpdate(adjust="none")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="simulate: update must be an update rule"):
        workers_of("adam", "none", 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="controller measures gradients"):
        workers_of(AdamUpdate(), "topk:ratio=0.1", 1, controller="autopilot")
