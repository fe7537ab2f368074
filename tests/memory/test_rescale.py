"""Another learning rate: residuals have the effect on parameters that they had before."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.base import Memory
from gradwire.simulation import Simulation
from gradwire.spec import format_spec, memory_classes

SHAPE = (48, 40)
WORKERS = 3
RATES = [0.5] * 6 + [0.05] * 6


def gradients(step: int) -> list[dict[str, Tensor]]:
    dice = torch.Generator().manual_seed(step)
    return [{"w": torch.randn(SHAPE, generator=dice)} for _ in range(WORKERS)]


def waiting(sim: Simulation) -> Tensor:
    """Returns the mean residual of all workers, plus the residuals of the averaging workers."""
    lanes = [worker.lanes["w"] for worker in sim.workers]
    total = torch.zeros(SHAPE).view(-1)
    for lane in lanes:
        kept = lane.memory.unsent(lane.memory_state)
        if kept is not None:
            total += kept / WORKERS
    if "server" in lanes[0].aggregator_state:
        total += torch.cat([lane.aggregator_state["server"] for lane in lanes])
    return total.view(SHAPE)


def trained(memory: Memory | str | None, spec: str, exchange: str) -> tuple[Tensor, Tensor]:
    """Returns the parameter with all residuals applied, and that of dense training."""
    sim = gradwire.simulate(
        {"w": torch.zeros(SHAPE)}, spec, workers=WORKERS, memory=memory, exchange=exchange
    )
    here = dense = torch.zeros(SHAPE)
    for step, rate in enumerate(RATES):
        if step and rate != RATES[step - 1]:
            for worker in sim.workers:
                worker.rescale(RATES[step - 1] / rate)
        grads = gradients(step)
        here = here - rate * sim.step(grads)["w"]
        dense = dense - rate * torch.stack([g["w"] for g in grads]).mean(dim=0)
    return here - RATES[-1] * waiting(sim), dense


@pytest.mark.parametrize("exchange", ["gather", "sharded", "leader"])
def test_nothing_is_lost_and_nothing_counts_twice(exchange: str) -> None:
    here, dense = trained("residual", "topk:ratio=0.05,values=fp32", exchange)
    torch.testing.assert_close(here, dense, rtol=1e-4, atol=1e-5)


def test_what_averaging_ranks_keep_is_rescaled_without_a_memory_too() -> None:
    """Every rank sends everything, so that only the second encoding loses anything."""
    sim = gradwire.simulate(
        {"w": torch.zeros(SHAPE)}, "efsign", workers=2, memory="none", exchange="sharded"
    )
    sim.step(gradients(0)[:2])
    lanes = [worker.lanes["w"] for worker in sim.workers]
    before = [lane.aggregator_state["server"].clone() for lane in lanes]
    assert before[0].count_nonzero() > 0
    for worker in sim.workers:
        worker.rescale(4.0)
    for lane, server in zip(lanes, before, strict=True):
        assert torch.equal(lane.aggregator_state["server"], 4 * server)


def test_a_residual_in_few_bits_loses_its_rounding_only() -> None:
    here, dense = trained("lowbit", "topk:ratio=0.05,values=fp32", "gather")
    exact, _ = trained("residual", "topk:ratio=0.05,values=fp32", "gather")
    assert (here - dense).norm() < 0.02 * exact.norm()


def test_a_variance_is_rescaled_with_what_it_is_compared_with() -> None:
    """Else a lower rate would make all that waits look certain, and send it at once."""
    here, dense = trained(None, "variance", "auto")
    torch.testing.assert_close(here, dense, rtol=1e-3, atol=1e-3)
    sims = [
        gradwire.simulate({"w": torch.zeros(SHAPE)}, "variance", workers=WORKERS) for _ in range(2)
    ]
    for step in range(5):
        for sim in sims:
            sim.step(gradients(step))
    for worker in sims[1].workers:
        worker.rescale(10.0)
    still = [{"w": torch.zeros(SHAPE)}] * WORKERS
    plain, rescaled = (sim.step(still)["w"] for sim in sims)
    assert torch.equal(plain != 0, rescaled != 0)


def owing(is_debt: bool) -> list[Memory]:
    found = [cls(**example) for cls in memory_classes().values() for example in cls.examples]
    return [memory for memory in found if memory.is_debt == is_debt]


@pytest.mark.parametrize("memory", owing(True), ids=format_spec)
def test_residuals_are_multiplied(memory: Memory) -> None:
    state = memory.state(300, torch.device("cpu"))
    grad = torch.randn(300, generator=torch.Generator().manual_seed(0))
    given = memory.before(grad, state, state)
    if given.residual_out is not None:
        given.residual_out.copy_(
            given.grad if given.residual is None else given.grad + given.residual
        )
    memory.after(given, torch.zeros(300), state, state)
    before = memory.unsent(state)
    before = None if before is None else before.clone()
    memory.rescale(state, 0.25)
    after = memory.unsent(state)
    if before is None:
        assert after is None
        return
    assert before.count_nonzero() > 290
    torch.testing.assert_close(after, 0.25 * before)


@pytest.mark.parametrize("memory", owing(False), ids=format_spec)
@pytest.mark.parametrize("exchange", ["gather", "sharded"])
def test_differences_to_a_known_gradient_stay(memory: Memory, exchange: str) -> None:
    """The result is a gradient whatever the rate is, so nothing may change."""
    tensors = {"w": torch.zeros(SHAPE)}
    sims = [
        gradwire.simulate(tensors, "topk:ratio=0.1", workers=2, memory=memory, exchange=exchange)
        for _ in range(2)
    ]
    for step in range(6):
        outs = [sim.step(gradients(step)[:2])["w"] for sim in sims]
        assert torch.equal(outs[0], outs[1])
        for worker in sims[1].workers:
            worker.rescale(10.0)
