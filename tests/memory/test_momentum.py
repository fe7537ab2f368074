"""Momentum correction: the effect of plain momentum, only delayed."""

import pytest
import torch
from torch import Tensor

from gradwire.comm.simulated import Simulated
from gradwire.engine.make_plan import make_plan, open_lane
from gradwire.engine.step import Lane, lane_rounds, run_rounds
from gradwire.errors import ConfigError
from gradwire.memory.momentum import MomentumCorrection
from gradwire.spec import format_spec, parse, parse_memory
from gradwire.types import EncodeContext, State

CPU = torch.device("cpu")


def lanes_of(
    spec: str, memory: str, numel: int, *, exchange_name: str = "gather", size: int = 1
) -> list[Lane]:
    contexts = [EncodeContext((numel,), rank, size) for rank in range(size)]
    kept = parse_memory(memory)
    return [open_lane("w", parse(spec), kept, exchange_name, ctx, CPU) for ctx in contexts]


def step(lanes: list[Lane], *grads: Tensor) -> Tensor:
    """Runs one step and returns the gradient of the first rank."""
    outs = [grad.clone() for grad in grads]
    pairs = zip(outs, lanes, strict=True)
    Simulated(len(lanes)).run([run_rounds([lane_rounds(out, lane)]) for out, lane in pairs])
    for lane in lanes:
        lane.commit()
    return outs[0]


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def by_hand(memory: MomentumCorrection, state: State, grad: Tensor, sent: list[int]) -> list[float]:
    """Runs one step that sends the entries `sent`; returns what there was to send."""
    given = memory.before(grad.clone(), state, state)
    offered: list[float] = given.grad.tolist()
    assert given.residual_out is not None
    given.residual_out.copy_(given.grad)
    given.residual_out[sent] = 0.0
    memory.after(given, torch.zeros_like(grad), state, state)
    return offered


def test_unsent_entries_accumulate_momentum_and_sent_ones_are_reset() -> None:
    memory = MomentumCorrection(momentum=0.5)
    state = memory.state(2, CPU)
    grad = torch.tensor([1.0, 4.0])
    assert by_hand(memory, state, grad, [1]) == [1.0, 4.0]
    assert state["momentum"].tolist() == [1.0, 0.0]
    assert state["residual"].tolist() == [1.0, 0.0]
    # The first: u = 0.5 + 1, v = 1 + 1.5. The second has no momentum left: u = v = 4.
    assert by_hand(memory, state, grad, [0, 1]) == [2.5, 4.0]
    assert state["momentum"].tolist() == [0.0, 0.0]
    assert state["residual"].tolist() == [0.0, 0.0]


def test_nesterov_by_hand() -> None:
    memory = MomentumCorrection(momentum=0.5, nesterov=True)
    state = memory.state(1, CPU)
    # u = 0.5 (0 + 4) = 2 and v = 2 + 4; then u = 0.5 (2 + 4) = 3 and v = 6 + 3 + 4.
    assert by_hand(memory, state, torch.tensor([4.0]), []) == [6.0]
    assert by_hand(memory, state, torch.tensor([4.0]), [0]) == [13.0]


def test_an_unsent_entry_is_worth_the_sum_of_plain_momentum() -> None:
    memory = MomentumCorrection(momentum=0.9)
    state = memory.state(50, CPU)
    velocity, total = torch.zeros(50), torch.zeros(50)
    for seed in range(10):
        velocity = 0.9 * velocity + normal(50, seed)
        total = total + velocity
        by_hand(memory, state, normal(50, seed), [])
    torch.testing.assert_close(state["residual"], total)
    torch.testing.assert_close(state["momentum"], velocity)


@pytest.mark.parametrize("exchange_name", ["gather", "sharded"])
def test_without_momentum_it_is_the_residual(exchange_name: str) -> None:
    spec = "topk:ratio=0.1,values=bf16"
    here = lanes_of(spec, "momentum:momentum=0", 300, exchange_name=exchange_name, size=3)
    there = lanes_of(spec, "residual", 300, exchange_name=exchange_name, size=3)
    for seed in range(5):
        grads = [normal(300, 10 * seed + rank) for rank in range(3)]
        assert torch.equal(step(here, *grads), step(there, *grads))


def test_what_rounding_left_is_kept() -> None:
    lanes = lanes_of("topk:ratio=0.5,values=bf16", "momentum", 2)
    fine = 1.0 + 2.0**-10
    assert step(lanes, torch.tensor([fine, 0.5])).tolist() == [1.0, 0.0]
    assert lanes[0].memory_state["residual"].tolist() == [2.0**-10, 0.5]
    assert lanes[0].memory_state["momentum"].tolist() == [0.0, 0.5]


def test_comes_to_the_minimum_of_a_quadratic() -> None:
    """Ranks see it from different sides, each along half of the axes, and one entry at a time."""
    curvature = torch.linspace(0.2, 1, 20)
    sides = [torch.arange(20) % 2 == rank for rank in range(2)]
    lanes = lanes_of("topk:ratio=0.05,values=fp32", "momentum", 20, size=2)
    goal, w = normal(20), torch.zeros(20)
    for _ in range(500):
        w = w - 0.05 * step(lanes, *[side * curvature * (w - goal) for side in sides])
    assert (w - goal).norm() < 0.01 * goal.norm()


def test_clip_bounds_the_norm_of_a_local_gradient() -> None:
    memory = MomentumCorrection(clip=1.0)
    large, small = 1e25 * normal(100), torch.full((100,), 0.01)
    state = memory.state(100, CPU)
    given = memory.before(large.clone(), state, memory.state(100, CPU))
    torch.testing.assert_close(given.grad, large / large.double().norm().float())
    given = memory.before(small.clone(), state, memory.state(100, CPU))
    torch.testing.assert_close(given.grad, small)
    state = memory.state(5, CPU)
    assert memory.before(torch.zeros(5), state, state).grad.tolist() == [0.0] * 5


def test_under_another_rate_an_unsent_entry_is_worth_what_plain_momentum_did() -> None:
    """Steps of rate times velocity, where the velocity is that of torch.optim.SGD."""
    parameter = torch.nn.Parameter(torch.zeros(50))
    optimiser = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    memory = MomentumCorrection(momentum=0.9)
    state = memory.state(50, CPU)
    for seed in range(10):
        if seed == 5:
            optimiser.param_groups[0]["lr"] = 0.125
            memory.rescale(state, 0.5 / 0.125)
        parameter.grad = normal(50, seed)
        optimiser.step()
        by_hand(memory, state, normal(50, seed), [])
    torch.testing.assert_close(-0.125 * state["residual"], parameter.detach())


@pytest.mark.parametrize("memory", ["momentum", "momentum:clip=1.0"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_entries_appear(memory: str, bad: float) -> None:
    lanes = lanes_of("topk:ratio=0.1", memory, 100, size=2)
    grad = normal(100)
    grad[7] = bad
    assert not step(lanes, grad, normal(100))[7].isfinite()


def test_needs_a_contraction() -> None:
    with pytest.raises(ConfigError, match="does not go with memory 'momentum'"):
        make_plan("qsgd:bits=2", "momentum", "auto", [], 2)


def test_spec_round_trip() -> None:
    memory = MomentumCorrection(momentum=0.8, nesterov=True, clip=0.5)
    assert parse_memory(format_spec(memory)) == memory
    assert format_spec(MomentumCorrection()) == "momentum"


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_momentum_out_of_range(value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^momentum: momentum must be in \[0, 1\), got {value}"):
        MomentumCorrection(momentum=value)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_clip_out_of_range(value: float) -> None:
    with pytest.raises(ConfigError, match=f"^momentum: clip must be at least 0, got {value}"):
        MomentumCorrection(clip=value)
