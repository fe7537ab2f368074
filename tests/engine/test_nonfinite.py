"""A gradient that is not finite: all ranks see it, and nothing is remembered of it."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.engine.nonfinite import LARGE, NonFiniteGuard, _unasked
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.simulate import Simulation, simulate
from gradwire.spec import compressor_classes, format_spec

SPECS = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]
MEMORIES = ["residual", "momentum", "ef21", "ef21_sgdm", "lowbit"]
WORKERS = 3
SHAPES = {"a": (40, 30), "b": (1100, 3), "c": (7,)}


def gradients(step: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        for _ in range(WORKERS)
    ]


def spoilt(step: int, bad: float, worker: int, name: str) -> list[dict[str, Tensor]]:
    grads = gradients(step)
    grads[worker][name].view(-1)[-1] = bad
    return grads


def simulation(spec: str, **options: object) -> Simulation:
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return simulate(tensors, spec, workers=WORKERS, **options)  # type: ignore[arg-type]


def same(one: object, other: object) -> bool:
    """Equal to the bit, whatever they are made of."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and all(same(v, other[k]) for k, v in one.items())
    return one == other


def check_that_it_leaves_no_trace(sim: Simulation, twin: Simulation, bad: float, name: str) -> None:
    """Two good steps with a bad one between them, beside a twin that never has the bad one."""
    sim.step(gradients(0))
    twin.step(gradients(0))
    before = sim.state_dict()
    means = sim.step(spoilt(1, bad, 1, name))
    assert not means[name].isfinite().all()
    assert same(before, sim.state_dict())
    after, expected = sim.step(gradients(2)), twin.step(gradients(2))
    assert all(torch.equal(after[n], expected[n]) for n in SHAPES)
    assert (sim.stats()["steps"], sim.stats()["skipped"]) == (2, 1)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_no_method_remembers_a_bad_step(spec: str, bad: float) -> None:
    if gradwire.parse(spec).family == "dense":
        pytest.skip("uncompressed gradients go through a plain sum, and nothing is kept")
    check_that_it_leaves_no_trace(simulation(spec), simulation(spec), bad, "a")


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("exchange", ["gather", "sharded", "leader"])
@pytest.mark.parametrize("name", ["a", "c"])
def test_no_memory_and_exchange_does(memory: str, exchange: str, name: str) -> None:
    sims = [simulation("topk:ratio=0.1", memory=memory, exchange=exchange) for _ in range(2)]
    check_that_it_leaves_no_trace(*sims, float("nan"), name)


@pytest.mark.parametrize("between", ["gather", "sharded", "leader"])
@pytest.mark.parametrize("node", [1, 3])
def test_no_node_does(between: str, node: int) -> None:
    exchange = f"hierarchical:node={node},between={between}"
    sims = [simulation("topk:ratio=0.1", exchange=exchange) for _ in range(2)]
    check_that_it_leaves_no_trace(*sims, float("nan"), "a")


@pytest.mark.parametrize("spec", ["none", "fp16", "bf16"])
def test_dense_means_carry_it_themselves(spec: str) -> None:
    sim = simulation(spec)
    assert not sim.step(spoilt(0, float("inf"), 2, "a"))["a"].isfinite().all()
    assert all(mean.isfinite().all() for mean in sim.step(gradients(1)).values())


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "randomk:ratio=0.1", "signsgd", "powersgd"])
def test_every_gradient_of_the_bucket_is_spoilt(spec: str) -> None:
    """So that a scaler notices, whichever it looks at."""
    means = simulation(spec).step(spoilt(0, float("nan"), 0, "a"))
    assert all(not mean.isfinite().all() for mean in means.values())


def test_the_first_step_may_be_bad() -> None:
    sim, twin = simulation("powersgd"), simulation("powersgd")
    sim.step(spoilt(0, float("nan"), 0, "a"))
    expected, means = twin.step(gradients(1)), sim.step(gradients(1))
    assert all(torch.equal(means[n], expected[n]) for n in SHAPES)


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "none"])
def test_raise_tells_and_goes_on(spec: str) -> None:
    sim, twin = (simulation(spec, nan_policy="raise") for _ in range(2))
    assert not sim.workers[0].is_straight()
    with pytest.raises(NonFiniteError, match="step 0 is not finite"):
        sim.step(spoilt(0, float("nan"), 1, "b"))
    means, expected = sim.step(gradients(1)), twin.step(gradients(1))
    assert all(torch.equal(means[n], expected[n]) for n in SHAPES)


def test_a_run_that_is_stuck_says_so_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    sim = simulation("topk:ratio=0.1")
    for _ in range(9):
        sim.step(spoilt(0, float("nan"), 1, "a"))
    sim.step(gradients(0))
    sim.step(spoilt(0, float("nan"), 1, "a"))
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    once = "a gradient of step 0 is not finite on some rank; it does not count"
    per_worker = [once, *(f"{once} ({n} times in a row)" for n in (2, 4, 8))]
    per_worker += ["gradients are finite again after 9 steps", once.replace("step 0", "step 1")]
    assert sorted(said) == sorted(per_worker * WORKERS)
    assert sim.stats()["skipped"] == 10


def test_every_bad_step_raises_if_that_is_asked_for() -> None:
    sim = simulation("topk:ratio=0.1", nan_policy="raise")
    for _ in range(3):
        with pytest.raises(NonFiniteError):
            sim.step(spoilt(0, float("nan"), 1, "a"))


def test_ignore_looks_at_nothing_and_needs_no_second_room() -> None:
    sim = simulation("topk:ratio=0.1", nan_policy="ignore")
    lane = sim.workers[0].lanes["a"]
    room = lane.memory_state["residual"].data_ptr()
    sim.step(spoilt(0, float("nan"), 1, "a"))
    assert sim.stats()["skipped"] == 0
    assert lane.memory_state["residual"].data_ptr() == room


def test_policies_are_equal_while_all_is_finite() -> None:
    sims = [simulation("topk:ratio=0.1", nan_policy=p) for p in ("propagate", "raise", "ignore")]
    for step in range(3):
        means = [sim.step(gradients(step)) for sim in sims]
        assert all(torch.equal(m["a"], means[0]["a"]) for m in means)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nan_policy must be one of .* got 'hope'"):
        simulation("topk:ratio=0.1", nan_policy="hope")


@pytest.mark.parametrize("exchange", ["auto", "hierarchical:node=1", "hierarchical:node=3"])
def test_the_word_costs_no_call(exchange: str) -> None:
    for spec in ("topk:ratio=0.1", "powersgd", "randomk:ratio=0.1,values=fp32"):
        careful = simulation(spec, exchange=exchange)
        careless = simulation(spec, exchange=exchange, nan_policy="ignore")
        careful.step(gradients(0))
        careless.step(gradients(0))
        assert careful.stats()["calls"] == careless.stats()["calls"]


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_the_word_makes_no_number_wider(spec: str) -> None:
    """Two bytes more in a ring of three."""
    careful, careless = simulation(spec), simulation(spec, nan_policy="ignore")
    careful.step(gradients(0))
    careless.step(gradients(0))
    sent, least = careful.stats()["sent_bytes"], careless.stats()["sent_bytes"]
    assert int(str(sent)) - int(str(least)) in (2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_it_sees_any_entry_of_any_gradient(dtype: torch.dtype, bad: float) -> None:
    for place in range(7):
        grads = [torch.full((3,), 3e4, dtype=dtype), torch.full((2, 2), -3e4, dtype=dtype)]
        assert not NonFiniteGuard(grads).raised
        grads[place // 3 if place < 3 else 1].view(-1)[place % 3 if place < 3 else place - 3] = bad
        assert NonFiniteGuard(grads).raised
    assert not NonFiniteGuard([torch.zeros(0)]).raised


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), float("-inf")])
def test_a_gpu_would_find_the_same_unasked(bad: float) -> None:
    """Small ones put together, large ones where they are, and neighbours as one."""
    room = torch.full((12,), torch.finfo(torch.float32).max)
    apart = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(LARGE), torch.zeros(2, 2)]
    for tensors in ([room[:5], room[5:]], apart):
        for tensor in tensors:
            tensor.view(-1)[-1] += bad
            assert (
                _unasked(tensors).tolist() == NonFiniteGuard(tensors).raised.tolist() == [bad != 0]
            )
            tensor.view(-1)[-1] = 0


def test_the_largest_numbers_are_finite() -> None:
    largest = torch.finfo(torch.float32).max
    assert not NonFiniteGuard([torch.tensor([largest, -largest])]).raised
