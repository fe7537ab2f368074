"""The residual in 8 bits: a quarter of the memory, for an error that is known."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.memory.lowbit import BLOCK, LowBit
from gradwire.types import EFInput, State
from lockstep import Lockstep, noise

CPU = torch.device("cpu")


def keep(x: Tensor) -> State:
    """Returns the state after a step that sent nothing of `x`."""
    memory = LowBit()
    state = memory.state(x.numel(), CPU)
    memory.after(EFInput(x.clone(), x.clone(), x.clone()), x, state, state)
    return state


def stored(x: Tensor) -> Tensor:
    """Returns the residual of `x` in the next step."""
    ef = LowBit().before(torch.zeros_like(x), keep(x), {})
    return ef.total()


def test_codes_by_hand() -> None:
    state = keep(torch.tensor([127.0, -63.6, 0.4, 0.0, -127.0]))
    assert state["codes"].tolist() == [127, -64, 0, 0, -127]
    assert state["scales"].tolist() == [1.0]


def test_a_quarter_of_the_memory() -> None:
    numel = 1_000_000
    state = LowBit().state(numel, CPU)
    assert {key: tensor.dtype for key, tensor in state.items()} == {
        "codes": torch.int8,
        "scales": torch.float32,
    }
    assert sum(tensor.nbytes for tensor in state.values()) == numel + 4 * -(-numel // 256)
    after = keep(noise(numel))
    # A tensor that is a view of a longer one would hold on to all of it.
    storage = sum(tensor.untyped_storage().nbytes() for tensor in after.values())
    assert storage / (4 * numel) < 0.255


@pytest.mark.parametrize("numel", [0, 1, 7, 255, 256, 257, 1000])
def test_the_residual_is_off_by_half_a_scale_at_most(numel: int) -> None:
    x = noise(numel) * torch.logspace(-3, 3, max(1, numel))[:numel]
    back = stored(x)
    scales = keep(x)["scales"].repeat_interleave(BLOCK)[:numel]
    assert ((back - x).abs() <= 0.5001 * scales).all()


@pytest.mark.parametrize("largest", [1e-45, 1e-42, 1e-38, 3e38])
def test_the_smallest_and_largest_floats(largest: float) -> None:
    x = torch.tensor([largest, -largest, 0.0])
    back = stored(x)
    assert back.isfinite().all()
    assert (back - x).abs().max() <= max(0.005 * largest, 1e-43)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_becomes_zero_and_no_other(bad: float) -> None:
    x = torch.ones(2 * BLOCK)
    x[3] = bad
    back = stored(x)
    assert torch.equal(back[:BLOCK], torch.zeros(BLOCK))
    torch.testing.assert_close(back[BLOCK:], torch.ones(BLOCK))


def test_the_same_residual_gives_the_same_bytes() -> None:
    one, two = keep(noise(1000)), keep(noise(1000))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_only_the_rounding_is_lost() -> None:
    """Sent plus left is given, but for half a scale an entry and step, as in the docstring."""
    workers = Lockstep("topk:ratio=0.1,values=fp32", "lowbit", "gather", 1000, size=2)
    sent, ef, bound = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)
    for step in range(50):
        grads = noise(2, 1000, seed=step)
        sent += workers.step(*grads)
        ef += grads.mean(dim=0)
        scales = workers.stacked_state("scales").mean(dim=0)
        bound += 0.51 * scales.repeat_interleave(BLOCK)[:1000]
    residual_out = torch.stack(
        [
            LowBit().before(torch.zeros(1000), lane.memory_state, {}).total()
            for lane in workers.lanes
        ]
    ).mean(dim=0)
    error = (sent + residual_out - ef).abs()
    assert (error <= bound + 1e-4).all()
    # Rounding to nearest errs to both sides, so that most of it cancels.
    assert error.mean() < 0.2 * bound.mean()


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "efsign"])
def test_descends_as_with_the_full_residual(spec: str) -> None:
    """Half way of a quadratic's descent, relative to where float32's residual gets."""
    optimum = noise(512, seed=3)
    ends = {}
    for memory in ("residual", "lowbit"):
        workers = Lockstep(spec, memory, "gather", 512, size=2)
        x = torch.zeros(512)
        for step in range(300):
            x -= 0.05 * workers.step(*(x - optimum + 0.1 * noise(2, 512, seed=step)))
        ends[memory] = float((x - optimum).norm())
    assert ends["lowbit"] < 1.2 * ends["residual"]
    assert ends["lowbit"] < 0.3 * optimum.norm()


def test_rescale_changes_what_comes_back() -> None:
    state = keep(torch.tensor([1.0, -2.0]))
    LowBit().rescale(state, 0.5)
    back = LowBit().before(torch.zeros(2), state, {}).total()
    torch.testing.assert_close(back, torch.tensor([0.5, -1.0]), rtol=0.01, atol=0)


def test_a_saved_state_resumes_bitwise() -> None:
    def simulation() -> gradwire.Simulation:
        return gradwire.simulate(
            {"w": torch.zeros(64, 64)}, "topk:ratio=0.05", workers=2, memory="lowbit"
        )

    def step(sim: gradwire.Simulation, seed: int) -> Tensor:
        return sim.step([{"w": noise(64, 64, seed=10 * seed + rank)} for rank in range(2)])["w"]

    one, two = simulation(), simulation()
    step(one, 0)
    two.load_state_dict(one.state_dict())
    assert torch.equal(step(one, 1), step(two, 1))


def test_stats_can_be_asked_for() -> None:
    sim = gradwire.simulate({"w": torch.zeros(64, 64)}, "efsign", workers=2, memory="lowbit")
    sim.step([{"w": noise(64, 64, seed=rank)} for rank in range(2)])
    assert sim.stats()["residual_norm"] > 0
