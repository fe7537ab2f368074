"""Steps replayed as CUDA graphs equal the same steps launched kernel by kernel."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.engine.cuda_graphs import is_graph_safe
from gradwire.engine.engine import Engine
from gradwire.simulation import Simulation
from gradwire.spec import compressor_classes, format_spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

SPECS = [format_spec(cls(**e)) for cls in compressor_classes().values() for e in cls.examples]
SHAPES = {"a": (64, 96), "b": (96,), "c": (200, 33), "d": (8, 16, 3, 3)}
WORKERS, STEPS, BAD = 3, 12, 7


def make_simulation(spec: str, cuda_graphs: bool, **options: str) -> Simulation:
    tensors = {name: torch.zeros(shape, device="cuda") for name, shape in SHAPES.items()}
    return gradwire.simulate(tensors, spec, workers=WORKERS, cuda_graphs=cuda_graphs, **options)


def gradients(step: int) -> list[dict[str, Tensor]]:
    """Returns the gradients of a step, seeded by it; one step has an infinite entry."""
    torch.manual_seed(step)
    grads = [
        {name: torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}
        for _ in range(WORKERS)
    ]
    if step == BAD:
        grads[1]["c"][3, 4] = torch.inf
    return grads


def can_be_captured(engine: Engine) -> bool:
    return all(is_graph_safe(lane) for lane in engine.lanes.values())


def compare(ours: Simulation, plain: Simulation, steps: range) -> None:
    for step in steps:
        means, expected = ours.step(gradients(step)), plain.step(gradients(step))
        for name in SHAPES:
            assert torch.equal(means[name].isnan(), expected[name].isnan())
            assert torch.equal(means[name].nan_to_num(), expected[name].nan_to_num()), step


def tensors_of(state: object) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_of(value)]
    return []


@pytest.mark.parametrize("spec", SPECS)
def test_a_replayed_step_equals_the_launched_step(spec: str) -> None:
    ours, plain = make_simulation(spec, True), make_simulation(spec, False)
    compare(ours, plain, range(STEPS))
    expected = int(can_be_captured(ours.workers[0]))
    assert ours.stats()["cuda_graphs"] == expected
    assert plain.stats()["cuda_graphs"] == 0
    assert ours.stats()["sent_bytes"] == plain.stats()["sent_bytes"]
    pairs = zip(tensors_of(ours.state_dict()), tensors_of(plain.state_dict()), strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
@pytest.mark.parametrize("memory", ["residual", "momentum", "ef21", "ef21-sgdm", "lowbit"])
def test_every_memory_and_exchange(memory: str, exchange: str) -> None:
    spec = "topk:ratio=0.01"
    options = {"memory": memory, "exchange": exchange}
    ours, plain = make_simulation(spec, True, **options), make_simulation(spec, False, **options)
    compare(ours, plain, range(STEPS))
    assert ours.stats()["cuda_graphs"] == 1


def test_switched_and_loaded_lanes_are_captured_anew() -> None:
    ours, plain = (
        make_simulation("topk:ratio=0.01", True),
        make_simulation("topk:ratio=0.01", False),
    )
    compare(ours, plain, range(6))
    for simulation in (ours, plain):
        simulation.switch("qsgd:bits=4")
    compare(ours, plain, range(8, 16))
    state = plain.state_dict()
    ours.load_state_dict(state)
    compare(ours, plain, range(16, 20))
    assert ours.stats()["cuda_graphs"] == 1


def test_a_step_that_measures_the_error_is_not_replayed() -> None:
    ours, plain = (
        make_simulation("powersgd:rank=2", True),
        make_simulation("powersgd:rank=2", False),
    )
    compare(ours, plain, range(8, 112))
    assert ours.stats()["relative_error"] == plain.stats()["relative_error"]


@pytest.mark.parametrize(
    ("spec", "controller", "recordings"),
    [
        ("topk:ratio=0.1", "autopilot", 1),
        ("topk:ratio=0.1", "accordion:low=0.1,high=0.01,epoch_steps=10,interval=1", 1),
        ("topk:ratio=0.1", "schedule:first=0.1,last=0.01,stages=2,length=20", 1),
        ("topk:ratio=0.1", "gravac:low=10,high=1000,window=5", 1),
        ("topk:ratio=0.1", "gravac:low=10,high=1000,window=5,epsilon=0.2", 1),
        ("topk:ratio=0.1 | qsgd:bits=4", "gravac:low=10,high=40,window=5,epsilon=0.2", 1),
        ("randomk:ratio=0.5", "gravac:low=2,high=10,window=5,epsilon=0.5,gain_ref=raw", 1),
        # The host reads how many entries pass a threshold, so the step is not captured.
        ("redsync:ratio=0.1", "gravac:low=10,high=1000,window=5", 0),
    ],
)
def test_controlled_lanes_are_replayed_between_changes(
    spec: str, controller: str, recordings: int
) -> None:
    ours = make_simulation(spec, True, controller=controller)
    plain = make_simulation(spec, False, controller=controller)
    compare(ours, plain, range(8, 72))
    assert ours.stats()["controller"] == plain.stats()["controller"]
    assert ours.stats()["cuda_graphs"] == recordings


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "qsgd:bits=4", "powersgd:rank=2"])
def test_replaying_never_synchronizes(spec: str) -> None:
    ours = make_simulation(spec, True)
    grads = gradients(0)
    for _ in range(6):
        ours.step(grads)
    torch.cuda.synchronize()
    names = list(SHAPES)
    engine = ours.workers[0]
    assert len(engine._graphs) == 1
    programs = [
        w.bucket_program(names, ours._copies(r, grads[r])) for r, w in enumerate(ours.workers)
    ]
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours.network.run(programs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
