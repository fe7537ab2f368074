"""Steps replayed as CUDA graphs against the same steps launched kernel by kernel."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.engine.cuda_graphs import is_steady
from gradwire.engine.engine import Engine
from gradwire.simulate import Simulation
from gradwire.spec import compressor_classes, format_spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

SPECS = [format_spec(cls(**e)) for cls in compressor_classes().values() for e in cls.examples]
SHAPES = {"a": (64, 96), "b": (96,), "c": (200, 33), "d": (8, 16, 3, 3)}
WORKERS, STEPS, BAD = 3, 12, 7


def opened(spec: str, cuda_graphs: bool, **options: str) -> Simulation:
    tensors = {name: torch.zeros(shape, device="cuda") for name, shape in SHAPES.items()}
    return gradwire.simulate(tensors, spec, workers=WORKERS, cuda_graphs=cuda_graphs, **options)


def gradients(step: int) -> list[dict[str, Tensor]]:
    """The same for the same step; of one step a worker's is not finite."""
    torch.manual_seed(step)
    found = [
        {name: torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}
        for _ in range(WORKERS)
    ]
    if step == BAD:
        found[1]["c"][3, 4] = torch.inf
    return found


def is_recorded(lanes: Engine) -> bool:
    return all(is_steady(lane) for lane in lanes.lanes.values())


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
def test_a_replayed_step_is_the_step(spec: str) -> None:
    ours, plain = opened(spec, True), opened(spec, False)
    compare(ours, plain, range(STEPS))
    expected = int(is_recorded(ours.workers[0]))
    assert ours.stats()["recordings"] == expected
    assert plain.stats()["recordings"] == 0
    assert ours.stats()["sent_bytes"] == plain.stats()["sent_bytes"]
    pairs = zip(tensors_of(ours.state_dict()), tensors_of(plain.state_dict()), strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
@pytest.mark.parametrize("memory", ["residual", "momentum", "ef21", "ef21-sgdm", "lowbit"])
def test_every_memory_and_exchange(memory: str, exchange: str) -> None:
    spec = "topk:ratio=0.01"
    options = {"memory": memory, "exchange": exchange}
    ours, plain = opened(spec, True, **options), opened(spec, False, **options)
    compare(ours, plain, range(STEPS))
    assert ours.stats()["recordings"] == 1


def test_switched_and_loaded_lanes_are_recorded_anew() -> None:
    ours, plain = opened("topk:ratio=0.01", True), opened("topk:ratio=0.01", False)
    compare(ours, plain, range(6))
    for simulation in (ours, plain):
        simulation.switch("qsgd:bits=4")
    compare(ours, plain, range(8, 16))
    state = plain.state_dict()
    ours.load_state_dict(state)
    compare(ours, plain, range(16, 20))
    assert ours.stats()["recordings"] == 1


def test_a_sampled_step_is_not_replayed() -> None:
    ours, plain = opened("powersgd:rank=2", True), opened("powersgd:rank=2", False)
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
        # What passes a threshold is counted by the host, dense as the step may be.
        ("redsync:ratio=0.1", "gravac:low=10,high=1000,window=5", 0),
    ],
)
def test_steered_lanes_are_replayed_between_changes(
    spec: str, controller: str, recordings: int
) -> None:
    ours = opened(spec, True, controller=controller)
    plain = opened(spec, False, controller=controller)
    compare(ours, plain, range(8, 72))
    assert ours.stats()["controller"] == plain.stats()["controller"]
    assert ours.stats()["recordings"] == recordings


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "qsgd:bits=4", "powersgd:rank=2"])
def test_replaying_never_waits(spec: str) -> None:
    ours = opened(spec, True)
    given = gradients(0)
    for _ in range(6):
        ours.step(given)
    torch.cuda.synchronize()
    names = list(SHAPES)
    lanes = ours.workers[0]
    assert lanes._recorder.recordings == 1
    talks = [w.talk(names, ours._copies(r, given[r])) for r, w in enumerate(ours.workers)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours.network.run(talks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
